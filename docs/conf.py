"""The documentation site: `make docs` builds it into docs/_build/html, without any network.

Pages are the Markdown files of this folder. Notebooks and tables of results are copied from
elsewhere into docs/_generated (git-ignored), where the API reference and the page of figures are
made: notebooks as the last `make repro` executed them, or, where there was none, with the outputs
that are stored in notebooks/. Nothing is executed here.
"""

import re
import sys
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.writers.html5 import HTML5Translator

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from reference import reference_pages  # noqa: E402

ROOT = DOCS.parent
GENERATED = DOCS / "_generated"
FOLDERS = ("drawn", "cifar100", "pretrained", "protocols", "privacy", "studies")  # of figures/
NBSP = "\N{NO-BREAK SPACE}"
logger = getLogger(__name__)

# Notebook -> its executed copies in data/executed: the first that exists is shown.
EXECUTED = {
    "1_split": ("split-glyphs",),
    "2_train": ("train-glyphs",),
    "3_compare": ("compare",),
    "4_ablation": ("ablation",),
    "5_sweep": ("sweep-kappa*", "sweep-*"),
    "6_analyses": ("analyses",),
    "7_coresets": ("coresets",),
    "8_heterogeneity": ("studies-heterogeneity",),
    "9_paper": ("paper-tables", "paper-*tables"),
    "10_studies": ("studies",),
    "11_inversion": ("privacy-attack-0",),
    "12_privacy": ("privacy",),
    "13_rounds": ("cifar100-rounds",),
}


def executed_copy(name: str) -> Path | None:
    """The notebook `name` as the last `make repro` executed it, or None."""
    folder = ROOT / "data" / "executed"
    found = (
        path for glob in EXECUTED.get(name, ()) for path in sorted(folder.glob(f"{glob}.ipynb"))
    )
    return next(found, None)


def figure_page() -> str:
    """A page of all figures by the names of their files: texts show only those they speak of."""
    folders = {"Small scale": ROOT / "figures"}
    own = [each for name in FOLDERS for each in sorted((ROOT / "figures" / name).rglob("./"))]
    folders |= {f"`{each.name}`": each for each in own if any(each.glob("*.png"))}
    parts = ["# Figures"]
    for title, folder in folders.items():
        parts.append(f"## {title}")
        for path in sorted(folder.glob("*.png")):
            target = f"../../../{path.relative_to(ROOT).as_posix()}"
            parts.append(f"### `{path.stem}`\n\n![{path.stem}]({target})")
    return "\n\n".join(parts) + "\n"


def copy_sources() -> None:
    """Fill docs/_generated; files that have not changed keep their time, so pages are cached."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    copies = {f"notebooks/{path.name}": executed_copy(path.stem) or path for path in notebooks}
    folders = [ROOT / "figures" / name for name in FOLDERS]
    pages = [page for each in folders for page in each.rglob("*.md")]
    pages = sorted([*(ROOT / "figures").glob("*.md"), *pages])
    pages = [page for page in pages if page.name != "measured.md"]  # of this machine alone
    copies |= {path.relative_to(ROOT).as_posix(): path for path in pages}
    copies |= {path.name: path for path in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")}
    contents = {name: source.read_bytes() for name, source in copies.items()}
    made = {
        **reference_pages(ROOT / "stamp_core", ROOT / "workbench"),
        "figures/figures.md": figure_page(),
    }
    contents |= {name: text.encode() for name, text in made.items()}
    for name, content in contents.items():
        target = GENERATED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != content:
            target.write_bytes(content)
    for path in GENERATED.rglob("*"):
        if path.is_file() and path.relative_to(GENERATED).as_posix() not in contents:
            path.unlink()


def adapt_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links that are right in the repository lead to the copies; numbers are not broken."""
    text = source[0]
    if docname.startswith("_generated/notebooks/"):
        text = text.replace("](../docs/", "](../../")
    elif docname.startswith("_generated/"):
        text = text.replace("](docs/", "](../")
    else:
        copies = r"figures/[\w/]+\.md|notebooks/\w+\.ipynb|CONTRIBUTING\.md|CHANGELOG\.md"
        text = re.sub(rf"\]\(\.\./({copies})", r"](_generated/\1", text)
        figure = r"(?<!!)(\[[^]]*\])\(\.\./figures/(\w+)\.png\)"
        text = re.sub(figure, r"\1(_generated/figures/figures.md#\2)", text)
    if not docname.startswith("_generated/notebooks/"):
        text = text.replace(" ± ", f"{NBSP}±{NBSP}").replace(", AF ", f",{NBSP}AF{NBSP}")
        text = re.sub(r" \((\S+) to (\S+)\)", rf"{NBSP}(\1{NBSP}to{NBSP}\2)", text)
    source[0] = text


def write_math(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML, which browsers show without scripts from elsewhere."""
    block = isinstance(node, nodes.math_block)
    text = node.astext().replace(r"\dots", r"\ldots")
    try:
        markup = tex2mathml(text, as_block=block)
    except MathError as error:
        logger.warning("%s in the formula %s", error, text, location=node)
        markup = f"<code>{escape(text)}</code>"
    markup = re.sub("<mo[^>]*>([|⟨⟩])<", r'<mo stretchy="false" lspace="0" rspace="0">\1<', markup)
    self.body.append(f'<div class="math">{markup}</div>' if block else markup)
    raise nodes.SkipNode


def sort_tables(app: Sphinx, pagename: str, *_: object) -> None:
    """Pages of results get the script that sorts tables."""
    if pagename == "results" or pagename.startswith("_generated/figures/"):
        app.add_js_file("sort.js")


def setup(app: Sphinx) -> None:
    """Copy the sources and register what is above."""
    copy_sources()
    app.connect("source-read", adapt_source)
    app.connect("html-page-context", sort_tables)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))


project = "STAMP Workbench"
author = "The STAMP Workbench authors"
copyright = "2026, The STAMP Workbench authors"

extensions = ["myst_nb"]
exclude_patterns = ["_build"]
nitpicky = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_output_stderr = "remove"
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

highlight_language = "text"
html_theme = "furo"
html_title = "STAMP Workbench"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
