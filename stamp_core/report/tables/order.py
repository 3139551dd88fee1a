"""The order of methods beside the paper's: ranks of both, and how well they agree."""

import pandas as pd

from stamp_core.report.tables import page, printed
from stamp_core.report.text import mean_std
from stamp_core.results.ranks import rank_correlation

_FEWEST = 5  # methods, below which an order says nothing


def order_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The methods of one setting that the paper ranks, its best first: ours beside the paper's.

    `rows` is a `run_frame` of a setting, or of a miniature of it; empty if the paper prints none.
    """
    table = printed.table_of(rows.setting.iloc[0])
    if table is None:
        return pd.DataFrame()
    ours = rows.groupby("method").main_accuracy
    scores = ours.mean().rename("ours").to_frame().join(printed.rows(*table).accuracy, how="inner")
    scores = scores.dropna().sort_values("accuracy", ascending=False)
    ranks = scores.rank(ascending=False)
    text = [mean_std(ours.get_group(method)) for method in scores.index]
    return scores.assign(
        accuracy=text, paper=scores.accuracy, rank=ranks.ours, there=ranks.accuracy
    )


def order_section(rows: pd.DataFrame) -> list[str]:
    """The parts of a page about the order of one setting; none where few methods are in both."""
    table = order_table(rows)
    if len(table) < _FEWEST:
        return []
    found = rank_correlation(table.ours, table.paper)
    agreement = (
        f"Spearman's ρ between the two orders is {found['rho']:+.2f} "
        f"({found['low']:+.2f} to {found['high']:+.2f}, n = {len(table)} methods)."
    )
    names = {"method": "method", "accuracy": "accuracy", "rank": "rank"}
    names |= {"paper": "accuracy, paper", "there": "rank, paper"}
    shown = table.rename_axis("method").reset_index()[[*names]].rename(columns=names)
    shown = shown.assign(**{name: shown[name].map("{:g}".format) for name in [*names.values()][2:]})
    return ["Order beside the paper's:", page.markdown(shown), agreement]
