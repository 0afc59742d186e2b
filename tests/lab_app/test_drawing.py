"""Markup: what a log says is never taken for markup, and views only draw."""

import ast
from html.parser import HTMLParser
from pathlib import Path

import lab_app
from lab_app.drawing.card import draw_card
from lab_app.drawing.memory import draw_lens, draw_wall
from lab_app.drawing.timeaxis import draw_lanes, draw_strip
from lab_app.viewmodel.address import Address
from lab_app.viewmodel.picture import picture
from tests.lab_app.made_logs import make_log, opened
from tests.lab_app.small_run import crowded_run

EVIL = '"><img src=x onerror=alert(1)>'
VOID = {"path", "img", "br"}


class Tags(HTMLParser):
    """Collects tags and checks that they nest."""

    def __init__(self):
        super().__init__()
        self.seen, self.open = set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def draw(run, place):
    shown, palette = picture(run, place), run.palette
    return (draw_strip(run.strip, place.step, shown.values, shown.latencies)
            + draw_card(shown.card, palette) + draw_wall(shown.wall, palette)
            + draw_lanes(shown.lanes, palette) + draw_lens(shown.lens, run.block_size, palette))


def tags(markup):
    reader = Tags()
    reader.feed(markup)
    assert reader.open == []
    return reader.seen


def test_a_request_id_that_is_markup_is_drawn_as_text():
    run = opened(make_log([{"id": EVIL, "prompt": [1, 2], "max_tokens": 3}], num_blocks=4,
                            block_size=4, max_model_len=16))
    markup = draw(run, Address(0, EVIL))
    assert "img" not in tags(markup) and EVIL not in markup


def test_every_step_of_a_crowded_run_is_well_formed_markup():
    run = crowded_run()
    for step in range(0, run.num_steps, 5):
        assert {"section", "svg", "path"} <= tags(draw(run, Address(step, "r5")))


def test_the_wall_has_one_cell_a_block_tied_to_its_owners():
    run = crowded_run()
    markup = draw_wall(picture(run, Address(18)).wall, run.palette)
    assert markup.count("data-block=") == 28
    assert 'data-r="1 2 4"' in markup  # a block that r1, r2 and r4 share


def test_view_models_import_no_streamlit_and_the_lab_imports_no_torch_at_its_top():
    root = Path(lab_app.__file__).parent
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = {name for node in tree.body for name in imported(node)}
        assert "torch" not in top, path
        if path.parent.name == "viewmodel":
            assert not top & {"streamlit", "plotly"}, path


def imported(node):
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.split(".")[0]}
    return set()
