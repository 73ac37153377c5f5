"""Charts are well-formed, as high as what they show, and take any text. All figures here are made
up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvkeep.errors import SettingsError
from kvkeep_lab.bench import chart

SVG = "{http://www.w3.org/2000/svg}"


def transfer_result(**more: Any) -> dict[str, Any]:
    rows = [
        {
            "geometry": name,
            "direction": way,
            "block_bytes": 4096,
            "gbps": 10.0,
            "fraction_of_floor": fraction,
            "verify": verify,
        }
        for name, verify, fractions in (
            ("small", False, (0.5, 0.75, 1.0)),
            ("small", True, (0.25, 0.5, 0.8)),
        )
        for way, fraction in zip(("store", "load", "both"), fractions, strict=True)
    ]
    return {"floor_gbps": 20.0, "rows": rows, "gpu": "a GPU", **more}


def vllm_result(**more: Any) -> dict[str, Any]:
    rows = [
        {
            "connector": name,
            "prompt_tokens": length,
            "cold_ms": cold,
            "local_hit_ms": local,
            "external_hit_ms": hit,
        }
        for name, length, cold, local, hit in (
            ("none", 1000, 80.0, 10.0, None),
            ("kvkeep", 1000, 81.0, 11.0, 20.0),
            ("native", 1000, 82.0, 12.0, 40.0),
            ("none", 4000, 800.0, 20.0, None),
            ("kvkeep", 4000, 810.0, 21.0, 50.0),
            ("native", 4000, 820.0, 22.0, 200.0),
        )
    ]
    return {"model": "a model", "vllm": "1.2.3", "rows": rows, **more}


def load_result(**more: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"connector": name, "scenario": scenario, key: value}
        for scenario, key, values in (
            ("mixed", "output_tokens_per_s", (300.0, 400.0, 200.0)),
            ("decode_loads", "itl_p99_ms", (10.0, 12.5, 20.0)),
        )
        for name, value in zip(("none", "kvkeep", "native"), values, strict=True)
    ]
    return {"model": "a model", "vllm": "1.2.3", "repeats": 3, "rows": rows, **more}


def drawn(result: dict[str, Any], **options: Any) -> ElementTree.Element:
    given = {"case": "external_hit", "floor_gbps": 0.0, "token_bytes": 100_000, **options}
    return ElementTree.fromstring(chart.draw(chart.chart_of(result, **given)))


def marked(svg: ElementTree.Element, tag: str, word: str) -> list[ElementTree.Element]:
    return [each for each in svg.iter(SVG + tag) if word in each.get("class", "").split()]


def heights(svg: ElementTree.Element) -> list[float]:
    return [float(bar.get("height", "")) for bar in marked(svg, "rect", "bar")]


def texts(svg: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in svg.iter(SVG + "text")]


def test_bars_of_transfers_are_as_high_as_their_fraction() -> None:
    svg = drawn(transfer_result())
    full = chart._PLOT_HEIGHT
    # By direction, each without verification (pale) and with it.
    assert heights(svg) == [full * each for each in (0.5, 0.25, 0.75, 0.5, 1.0, 0.8)]
    assert ["pale" in bar.get("class", "") for bar in marked(svg, "rect", "bar")] == [
        True,
        False,
    ] * 3
    assert {"small", "GB/s: store 10.0, load 10.0, both 10.0", "0.75"} <= set(texts(svg))
    assert any("a GPU, plain copy 20 GB/s" in text for text in texts(svg))


def test_the_floor_of_transfers_is_a_plain_copy() -> None:
    result = transfer_result()
    result["rows"][0]["fraction_of_floor"] = 1.25  # a copy through a cache can be faster
    svg = drawn(result)
    _, line = marked(svg, "line", "floor")  # the first is in the key
    bottom = chart._TOP + chart._PLOT_HEIGHT
    assert float(line.get("y1", "")) == pytest.approx(bottom - chart._PLOT_HEIGHT / 1.25, abs=0.01)
    assert max(heights(svg)) == chart._PLOT_HEIGHT


def test_blocks_of_a_cpu_are_named_by_their_size() -> None:
    result = transfer_result(gpu=None)
    for row in result["rows"]:
        del row["geometry"]
    assert "blocks of 4KiB" in texts(drawn(result))


def test_each_length_of_a_prompt_has_its_own_scale() -> None:
    svg = drawn(vllm_result())
    full = chart._PLOT_HEIGHT
    assert heights(svg) == [full * 20 / 40, full, full * 50 / 200, full]
    said = texts(svg)
    assert {
        "1,000 tokens",
        "4,000 tokens",
        "kvkeep",
        "native",
        "recomputing: 800 ms",
        "50.0",
        "200",
    } <= set(said)
    assert "none" not in said
    assert any("a model, vLLM 1.2.3" in text for text in said)
    assert len(marked(svg, "line", "floor")) == 1  # in the key alone


def test_the_floor_of_an_external_hit_is_a_local_one_and_a_copy() -> None:
    svg = drawn(vllm_result(), floor_gbps=10.0)
    # 10 ms, and 1,000 tokens of 100 kB at 10 GB/s; 20 ms, and 4,000.
    assert {"floor 20.0 ms", "floor 60.0 ms"} <= set(texts(svg))
    bottom, full = chart._TOP + chart._PLOT_HEIGHT, chart._PLOT_HEIGHT
    levels = [float(line.get("y1", "")) for line in marked(svg, "line", "floor")[1:]]
    assert levels == [bottom - full * 20 / 40, bottom - full * 60 / 200]


def test_the_floor_of_all_else_is_the_engine_without_a_connector() -> None:
    svg = drawn(vllm_result(), case="cold")
    assert {"none", "floor 80.0 ms", "floor 800.0 ms"} <= set(texts(svg))
    assert len(heights(svg)) == 6
    assert {"floor 10.0 ms", "floor 20.0 ms"} <= set(texts(drawn(vllm_result(), case="local_hit")))


def test_each_scenario_has_its_own_scale_and_says_which_way_is_better() -> None:
    svg = drawn(load_result())
    full = chart._PLOT_HEIGHT
    assert heights(svg) == [full * part for part in (0.75, 1.0, 0.5, 0.5, 0.625, 1.0)]
    assert [each.text or "" for each in marked(svg, "text", "value")] == [
        "300",
        "400",
        "200",
        "10.0",
        "12.5",
        "20.0",
    ]
    names, notes = (
        [each.text or "" for each in marked(svg, "text", kind)] for kind in ("name", "note")
    )
    assert names == ["half of it found", "decoding while prompts are loaded"]
    assert ["more is better" in note for note in notes] == [
        True,
        False,
    ] and "less is better" in notes[1]
    low, high = (chart._TOP + full * (1 - part) for part in (0.5, 0.75))
    floors = [float(line.get("y1", "")) for line in marked(svg, "line", "floor")][1:]
    assert floors == [high, low], "what the engine without a connector does"


def test_what_was_not_seen_is_left_out() -> None:
    result = load_result()
    result["rows"][4]["itl_p99_ms"] = None
    svg = drawn(result)
    assert heights(svg)[3:] == [chart._PLOT_HEIGHT / 2, chart._PLOT_HEIGHT]
    with pytest.raises(ValueError, match="no row has a figure"):
        drawn(
            load_result(
                rows=[{"connector": "kvkeep", "scenario": "mixed", "output_tokens_per_s": None}]
            )
        )


def test_a_connector_keeps_its_colour_whichever_others_are_there() -> None:
    def colour(result: dict[str, Any]) -> set[str]:
        return {
            bar.get("class", "")
            for bar in marked(drawn(result), "rect", "bar")
            if "native" in "".join(bar.itertext())
        }

    alone = vllm_result()
    alone["rows"] = [row for row in alone["rows"] if row["connector"] != "kvkeep"]
    assert colour(alone) == colour(vllm_result()) == {"bar c1"}


def test_the_floor_crosses_no_label() -> None:
    assert chart._label_height(100, None) == 106
    assert chart._label_height(100, 130) == 106
    assert chart._label_height(100, 110) == 116
    assert chart._label_height(100, 100) == 106
    assert chart._label_height(100, 90) == 106


def test_text_is_escaped() -> None:
    hostile = '</text><script>alert("&")</script>'
    result = transfer_result(gpu=hostile)
    for row in result["rows"]:
        row["geometry"] = hostile
    svg = drawn(result)
    assert not list(svg.iter(SVG + "script"))
    assert hostile in texts(svg)


def test_nothing_lies_outside_and_nothing_is_fetched() -> None:
    for result in (transfer_result(gpu="a GPU with a very long name " * 5), vllm_result()):
        svg = drawn(result)
        width, height = float(svg.get("width", "")), float(svg.get("height", ""))
        assert svg.get("viewBox") == f"0 0 {svg.get('width')} {svg.get('height')}"
        for rect in svg.iter(SVG + "rect"):
            x, y, wide, tall = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
            assert x >= 0 and x + wide <= width and y >= 0 and y + tall <= height
        text = ElementTree.tostring(svg, encoding="unicode")
        assert "prefers-color-scheme:dark" in text
        assert "url(" not in text and "href" not in text and "@import" not in text


def test_a_file_becomes_a_file(tmp_path: Path) -> None:
    file, out = tmp_path / "result.json", tmp_path / "chart.svg"
    file.write_text(json.dumps(vllm_result()))
    assert chart.run(str(file), str(out), title="Mine & yours") == {
        "out": str(out),
        "groups": 2,
        "bars": 4,
    }
    assert texts(ElementTree.parse(out).getroot())[0] == "Mine & yours"


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    file, out = tmp_path / "result.json", str(tmp_path / "chart.svg")
    with pytest.raises(SettingsError, match="No such file"):
        chart.run(str(file), out)
    for bad in (
        "",
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [{"a": 1}]}',
        '{"rows": [{"connector": "kvkeep"}]}',
        '{"rows": [{"connector": "none", "scenario": "mixed"}]}',
        '{"rows": [{"connector": "none", "scenario": "mixed", "output_tokens_per_s": 0.0}], "repeats": 1}',
        '{"rows": [{"connector": "none", "scenario": 3, "itl_p99_ms": 1}], "repeats": 1}',
        "\xff",
    ):
        file.write_bytes(bad.encode("latin-1"))
        with pytest.raises(SettingsError, match="is no result of one of these benchmarks"):
            chart.run(str(file), out)
    file.write_text(json.dumps(vllm_result()))
    with pytest.raises(
        SettingsError, match='--case "warm": expected external_hit, local_hit, cold'
    ):
        chart.run(str(file), out, case="warm")
    with pytest.raises(SettingsError, match=r"--out .*: No such file"):
        chart.run(str(file), str(tmp_path / "nowhere" / "chart.svg"))
