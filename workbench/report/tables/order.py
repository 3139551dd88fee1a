"""The order of methods beside the paper's: ranks of both, and how well they agree."""

import pandas as pd

from workbench.report.ranks import rank_correlation
from workbench.report.tables import page, printed
from workbench.report.text import mean_std

_FEWEST = 5  # methods, below which an order says nothing


def order_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracies in % and ranks of the methods that are in the paper's table, its best first.

    `rows` is a `run_frame` of a setting, or of a miniature of it; empty if the paper has none.
    """
    table = printed.table_of(rows.setting.iloc[0])
    if table is None:
        return pd.DataFrame()
    means = 100 * rows.groupby("method").main_accuracy.mean()
    scores = pd.DataFrame({"ours": means, "paper": printed.rows(*table).accuracy}).dropna()
    ranks = scores.rank(ascending=False).add_prefix("rank, ")
    return scores.join(ranks).sort_values("paper", ascending=False)


def order_section(rows: pd.DataFrame) -> list[str]:
    """The parts of a page about the order of one setting; none where few methods are in both."""
    table = order_table(rows)
    if len(table) < _FEWEST:
        return []
    scores = rows.groupby("method").main_accuracy
    shown = {
        "method": table.index,
        "accuracy": [mean_std(scores.get_group(method)) for method in table.index],
        "rank, ours": table["rank, ours"].map("{:g}".format),
        "paper": table.paper.map("{:.1f}".format),
        "rank, paper": table["rank, paper"].map("{:g}".format),
    }
    found = rank_correlation(table.ours, table.paper)
    agreement = (
        f"Spearman's ρ between the two orders is {found['rho']:+.2f} "
        f"({found['low']:+.2f} to {found['high']:+.2f}, n = {len(table)} methods)."
    )
    return ["Order beside the paper's:", page.markdown(pd.DataFrame(shown)), agreement]
