"""Every page whole, from records made by hand: `python tests/report/test_pages.py` writes them."""

from pathlib import Path

import made_records
import pytest

from workbench.report import frames, tables
from workbench.report.tables import page
from workbench.report.text import DASH

PAGES = Path(__file__).parent / "pages"


def write_pages(folder: Path) -> None:
    """Write every page; definitions are left out, so that their words may change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "definitions", lambda title: f"(definitions: {title})")
        compared = made_records.compared()
        tables.write_results(compared, folder)
        tables.write_ablation(made_records.ablated(), folder)
        captions = {
            "kappa": ("radius κ", "2"),
            "other": ("something", ""),
            "server_lr": ("η", "1.0"),
        }
        tables.write_sensitivity(made_records.sensitive(), captions, folder)
        tables.write_coresets(made_records.selections(), folder)
        tables.write_heterogeneity(made_records.heterogeneous(), folder)
        tables.write_normalisation(made_records.normalised(), folder)
        tables.write_overlap(made_records.overlapping(), folder)
        tables.write_related(made_records.related(), folder)
        tables.write_paper(made_records.printed_runs(), folder)
        known = {("tuning", "gem"), ("tuning", "agem"), ("explored", "gpm")}
        for methods in ["gem", "agem", "old", "gpm"], ["gem"]:  # others stay
            records = made_records.candidates(methods)
            runs = [(*each.sweep, *each.run[:2]) for each in records]
            tried = [(kind, method, value, at) for kind, value, at, method in dict.fromkeys(runs)]
            tables.write_tuning(records, tried, [0, 1], folder, known)
        privacy = made_records.noisy(), *made_records.projected(), made_records.SPENT
        tables.write_privacy(*privacy, made_records.inverted(), folder)
        page.write_parts(folder / "matching.md", [page.markdown(tables.matching_table(compared))])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "pages"
    write_pages(folder)
    return folder


NAMES = ("results.md", "accuracy.csv", "summary.json", "ablation.md", "ablation.csv", "coresets.md")
NAMES += (
    "sensitivity.md",
    "heterogeneity.md",
    "normalisation.md",
    "overlap.md",
    "related.md",
    "paper.md",
    "privacy.md",
    "tuning.md",
    "tuning.csv",
    "matching.md",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_as_stored(name: str, written: Path) -> None:
    assert (written / name).read_text("utf-8") == (PAGES / name).read_text("utf-8")


def test_every_page_is_stored(written: Path) -> None:
    assert {path.name for path in written.iterdir()} == set(NAMES)


def test_every_definition_stands_on_a_page() -> None:
    pages = "".join(path.read_text("utf-8") for path in PAGES.glob("*.md"))
    lines = Path(page.__file__).with_name("definitions.md").read_text("utf-8").splitlines()
    for title in (line[2:] for line in lines if line.startswith("# ")):
        text = page.definitions(title)
        assert f"(definitions: {title})" in pages and text and "\n# " not in text


def test_without_records_the_papers_page_has_its_numbers_alone(tmp_path: Path) -> None:
    text = tables.write_paper([], tmp_path).read_text("utf-8")
    assert "Settings without a printed table" not in text and "nan" not in text.lower()
    row = ["fedavg", DASH, DASH, "31.7 ± 1.7", DASH, DASH, "25.2 ± 1.3", DASH, DASH, DASH]
    assert f"| {' | '.join(row)} |" in text


def test_a_row_says_of_how_many_seeds_its_numbers_are() -> None:
    few, more = (0.5,), (0.5, 0.6, 0.7)
    rules = [*made_records.selected("uniform", 5, more), *made_records.selected("uniform", 2, few)]
    rows = frames.coreset_frame([*made_records.selected(None, 0, more), *rules])
    table = tables.coreset_accuracies(rows).set_index("selection")
    assert table.n.to_dict() == {"no memory": "3", "random": "1 to 3"}


if __name__ == "__main__":
    write_pages(PAGES)
