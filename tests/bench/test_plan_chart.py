from __future__ import annotations

from xml.etree import ElementTree

from kvkeep.bench.plan import Costs, Plan, Row
from kvkeep.bench.plan_chart import bars, draw

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    Row(10, 0, 0.1, 10.0, 1 << 30, 0),
    Row(20, 0, 0.4, 40.0, 2 << 30, 0, knee=True),
    Row(40, 0, 0.5, 50.0, 4 << 30, 0),
    Row(20, 80, 0.6, 60.0, 2 << 30, 8 << 30),
]
PLAN = Plan(5, 50, 30, 60.0, Costs(), ROWS, ROWS[1], "Give it 2GiB & <no> more.")


def test_the_picture_has_a_dot_for_each_row_and_marks_the_knee() -> None:
    drawing = ElementTree.fromstring(draw(PLAN))
    assert drawing.findtext(f"{SVG}title") == "Give it 2GiB & <no> more."
    dots = [dot for dot in drawing.iter(f"{SVG}circle") if dot.get("fill") != "none"]
    titles = [dot.findtext(f"{SVG}title") for dot in dots]
    assert titles[0] == "memory 1GiB: 10.0% found, 10s saved"
    assert titles[3] == "memory 2GiB, disk 8GiB: 60.0% found, 1m saved"
    places = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in dots]
    assert [x for x, _ in places] == [70, 380, 690, 380], "doubled memory is the same way on"
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    [ring] = [ring for ring in drawing.iter(f"{SVG}circle") if ring.get("fill") == "none"]
    assert (ring.get("cx"), ring.get("cy")) == (dots[1].get("cx"), dots[1].get("cy"))
    assert "knee" in [text.text for text in drawing.iter(f"{SVG}text")]


def test_one_size_that_saves_nothing_can_be_drawn() -> None:
    row = Row(1, 0, 0.0, 0.0, 1 << 20, 0)
    ElementTree.fromstring(draw(Plan(1, 1, 1, 0.0, Costs(), [row], row, "")))
    assert bars([row], 10) == [""]


def test_bars_are_shares_of_the_most() -> None:
    assert bars(ROWS, 6) == ["█", "████ ◄ knee", "█████", "██████"]
