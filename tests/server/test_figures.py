from __future__ import annotations

from kvkeep.server.figures import MODELS, OTHER_MODELS, Figures, FiguresByModel, FiguresShown
from kvkeep.wire.messages import RequestReport


def report(**fields: int) -> RequestReport:
    return RequestReport("r", "default", [], **fields)


def test_time_saved_is_computing_less_loading_and_may_be_negative() -> None:
    figures = Figures()
    figures.count_report(report(avoided_us=1_500_000, load_us=2_000_000, computed_tokens=7))
    figures.count_report(report(local_tokens=3, unpriced_tokens=5))
    shown = FiguresShown.of(figures)
    assert (shown.saved_s, shown.avoided_s, shown.load_s) == (-0.5, 1.5, 2.0)
    assert (shown.requests, shown.tokens_computed, shown.tokens_local) == (2, 7, 3)
    assert shown.tokens_unpriced == 5


def test_figures_that_cannot_be_meant_do_no_harm() -> None:
    figures = Figures()
    figures.count_report(report(computed_tokens=-5, avoided_us=-1, load_us=1 << 62))
    figures.count_report(report(computed_tokens=1 << 62))
    shown = FiguresShown.of(figures)
    assert shown.tokens_computed == 1 << 32 and shown.load_s == 3600 and shown.avoided_s == 0


def test_models_are_bounded() -> None:
    models = FiguresByModel()
    for number in range(MODELS + 50):
        models.of(f"m{number}").requests += 1
    assert len(models.all()) == MODELS + 1
    assert models.all()[OTHER_MODELS].requests == 50
