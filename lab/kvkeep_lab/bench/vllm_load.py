"""Real vLLM under load, without a connector, with kvkeep's, and with its peers: throughput, and the
pace of decoding.

    mixed           many requests at a time, half of them with a prefix that was stored, and that the engine has lost
    fresh           the same with nothing to find: what storing costs
    decode_loads    time between tokens of requests that decode, while large prompts arrive that were stored
    decode_stores   the same, while large prompts arrive that are new
    conversations   whole conversations in waves, with engines of their own: see vllm_conversations

Every connector serves the same requests with the same number of blocks. How many those are of mixed
and fresh, the engine without a connector says: what it begins in a third of the time, since those
under way then take about the rest.

What is loaded while others decode must cost no computing, and must be loaded every time. So the
engine without a connector finds those prompts in its own prefix cache, and that of the others is
off: they have an engine of their own for decode.

All engines live at the same time and take turns, in changing order, one at work while others are
silent; each gets as much of a GPU as fits. Where that is too little they come one after the other.
Ratios are those of the same repeat."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvkeep.bench.progress import say
from kvkeep.bench.vllm_session import (
    Choice,
    FreeMemory,
    Turns,
    gpu_name,
    median,
    peers_may_fail,
    rotated,
    rounded,
    signals_end_the_block,
)
from kvkeep.bench.vllm_setup import (
    Connector,
    ServedModel,
    arguments,
    connector,
    decoding_with_graphs,
    environment,
    given_model,
    own_model,
)
from kvkeep.testing.process import JsonProcess
from kvkeep_lab.bench import vllm_conversations
from kvkeep_lab.bench.vllm_fit import fitted, pool_bytes
from kvkeep_lab.bench.vllm_lanes import LoadedEngine
from kvkeep_lab.bench.vllm_stations import CONVERSATIONS, DECODE, Plan, Station
from kvkeep_lab.bench.vllm_traffic import SIZES, Traffic

# Of kvkeep, at least and at most.
TARGETS = {
    "fresh_ratio": 0.98,
    "mixed_ratio": 1.0,
    "itl_p99_ratio": 1.05,
    "itl_decode_p99_ratio": 1.05,
}

OPTIONS = {
    "device": "auto, cpu or cuda; auto takes a GPU where there is one.",
    "model": "Folder of a checkpoint; auto makes a small Llama on a CPU, and on a GPU one of 8B geometry, without real "
    "weights.",
    "connectors": "Of none, kvkeep, lmcache and native, with commas between; auto is all that can be had, and for "
    "decode none and kvkeep.",
    "scenarios": "Of mixed, fresh and decode, with commas between; or conversations.",
    "seconds": "About how long each scenario takes without a connector.",
    "repeats": "How often each scenario is measured.",
    "interleave": "Let engines take turns, all of them alive: on a CPU, and where a GPU and its host have room. "
    "--no-interleave: one after the other.",
    "eager": "Let engines on a GPU start each kernel alone, also those of decoding, without CUDA graphs.",
}

_BEGINS_IN = 1 / 3  # of the time
_GIVES_UP_AFTER = 4  # times the time
_WAKING_TOKENS = 8  # less than a block, so nothing of it is kept
# of the times between tokens: with fewer, prompts come faster than they are computed
_LEAST_DECODED = 0.05


# -- the run


def run(
    device: str = "auto",
    model: str = "auto",
    connectors: str = "auto",
    scenarios: str = "mixed,fresh,decode",
    seconds: int = 15,
    repeats: int = 1,
    interleave: bool = True,
    eager: bool = False,
) -> dict[str, Any]:
    """Starts what each connector needs, and an engine with each; all are gone at the end, also
    after a signal."""
    plan = Plan.make(
        Choice.make(device, connectors), scenarios, seconds, repeats, interleave, eager
    )
    device = plan.choice.device
    with signals_end_the_block(), tempfile.TemporaryDirectory(prefix="kvkeep-vllm-") as folder:
        served = own_model(Path(folder), device) if model == "auto" else given_model(model, device)
        if plan.scenarios == (CONVERSATIONS,):
            return _conversations(plan, served)
        traffic = Traffic(SIZES[device], served)
        if plan.interleave and device == "cuda":
            together = fitted(traffic, plan.stations, FreeMemory.find())
            plan, traffic = replace(plan, interleave=together is not None), together or traffic
        bench = Bench(plan, traffic)
        with LoadedEngine.importing(plan.stations, bench.environment) as bench.spares:
            for group in plan.groups:
                bench.measure(group)
    return bench.result()


def _conversations(plan: Plan, model: ServedModel) -> dict[str, Any]:
    """Measures that scenario alone."""
    device = plan.choice.device
    sizes = vllm_conversations.SIZES[device]
    bench = vllm_conversations.Conversations(
        plan.choice, model, sizes, plan.repeats, plan.interleave, plan.graphs
    )
    bench.measure()
    return {
        "device": device,
        **({"gpu": gpu_name()} if device == "cuda" else {}),
        "model": model.description,
        "vllm": bench.vllm,
        "repeats": plan.repeats,
        "graphs": plan.graphs,
        CONVERSATIONS: bench.result(),
        "left_out": plan.choice.left_out | bench.left_out,
    }


@dataclass
class Subject:
    """A station's engine. `warm` are the kinds of traffic whose prefixes it has stored."""

    station: Station
    engine: LoadedEngine
    way: Connector
    warm: set[bool] = field(default_factory=set)


@dataclass
class Bench:
    """All that engines said, by connector and scenario, one for each repeat."""

    plan: Plan
    traffic: Traffic
    vllm: str = ""
    said: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    # of a scenario, as the engine without a connector began
    requests: dict[str, int] = field(default_factory=dict)
    spares: dict[Station, JsonProcess] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.traffic.model, self.traffic.sizes.most_tokens)

    def measure(self, stations: Sequence[Station]) -> None:
        """Stations whose engines live at the same time."""
        turns = Turns.on(self.plan.choice.device)
        with ExitStack() as stack:
            subjects: list[Subject] = []
            for station in stations:
                with self._forgiving(station, station.scenarios[0]), turns.turn(station):
                    say(
                        f"starting vLLM, connector: {station.connector}, for {', '.join(station.scenarios)}"
                    )
                    subjects.append(stack.enter_context(self._subject(station, len(stations))))
                    self.vllm = subjects[-1].engine.vllm
            say("waiting until their pools are as fast as they will be")
            for subject in subjects:
                subject.engine.wait_until_ready()
            for scenario in self.plan.scenarios:
                asked = [each for each in subjects if scenario in each.station.scenarios]
                for turn in range(self.plan.repeats):
                    for subject in rotated(asked, turn):
                        with (
                            self._forgiving(subject.station, scenario),
                            turns.turn(subject.station),
                        ):
                            self._measure(subject, scenario, turn)

    def _measure(self, subject: Subject, scenario: str, turn: int) -> None:
        name = subject.station.connector
        if turn and len(self._all(name, scenario)) != turn:
            return  # it has failed before
        self._warm_up(subject, scenario in DECODE)
        # after a pause it begins late
        subject.engine.ask(self.traffic.prefixes().prompts[0][:_WAKING_TOKENS])
        if scenario in DECODE:
            figures = self._decode(subject, scenario, turn)
        else:
            figures = self._load(subject, scenario, turn)
        self._all(name, scenario).append(figures)
        say(f"{scenario}, {turn + 1} of {self.plan.repeats}: {name}: {_told(figures)}")

    def _warm_up(self, subject: Subject, decode: bool) -> None:
        """Prefixes are stored once. Those of decode stay in the prefix cache of the one engine that
        has it on then."""
        if decode not in subject.warm:
            lane = self.traffic.large_prefixes() if decode else self.traffic.prefixes()
            subject.engine.load([lane], _GIVES_UP_AFTER * self.plan.seconds)
            subject.way.settle(sum(len(prompt) - 1 for prompt in lane.prompts) + 1)
            subject.warm.add(decode)
        if not decode:
            subject.engine.drop_local_cache()

    def _load(self, subject: Subject, scenario: str, turn: int) -> dict[str, Any]:
        seconds, at_a_time = self.plan.seconds, self.traffic.sizes.at_a_time
        known = self.requests.get(scenario)
        lane = self.traffic.requests(scenario, turn, known or at_a_time * (2 + seconds // 5))
        said = subject.engine.load([lane], seconds * (_GIVES_UP_AFTER if known else _BEGINS_IN))
        [served] = said["lanes"]
        self.requests.setdefault(scenario, served["begun"])
        reused = self.traffic.reused_tokens(scenario, served["begun"])
        return {
            "requests": served["done"],
            "failed": served["failed"],
            "seconds": said["seconds"],
            "prompt_tokens": served["prompt_tokens"],
            "output_tokens": served["tokens"],
            "output_tokens_per_s": served["tokens"] / said["seconds"],
            "total_tokens_per_s": (served["prompt_tokens"] + served["tokens"]) / said["seconds"],
            "ttft_mean_ms": served["ttft_ms"]["mean"],
            "ttft_p99_ms": served["ttft_ms"]["p99"],
            "cached_share": served["cached_tokens"] / reused if reused else None,
            "answers": served["answers"],
        }

    def _decode(self, subject: Subject, scenario: str, turn: int) -> dict[str, Any]:
        lanes = self.traffic.decode(scenario, turn, self.plan.seconds)
        said = subject.engine.load(lanes, self.plan.seconds, finish=False)
        decoding, large = said["lanes"]
        every, decoded = decoding["itl_ms"], decoding["itl_decode_ms"]
        seen = decoded["samples"] and decoded["samples"] >= _LEAST_DECODED * every["samples"]
        reused = self.traffic.reused_tokens(scenario, large["ttft_ms"]["samples"])
        return {
            "requests": large["done"],
            "failed": decoding["failed"] + large["failed"],
            "seconds": said["seconds"],
            "samples": every["samples"],
            "itl_p50_ms": every["p50"],
            "itl_p99_ms": every["p99"],
            "itl_decode_p50_ms": decoded["p50"] if seen else None,
            "itl_decode_p99_ms": decoded["p99"] if seen else None,
            "ttft_mean_ms": large["ttft_ms"]["mean"],
            "ttft_p99_ms": large["ttft_ms"]["p99"],
            "cached_share": large["cached_tokens"] / reused if reused else None,
            "answers": large["answers"],
        }

    def _all(self, name: str, scenario: str) -> list[dict[str, Any]]:
        return self.said.setdefault((name, scenario), [])

    def _forgiving(self, station: Station, scenario: str) -> AbstractContextManager[None]:
        return peers_may_fail(station.connector, self.plan.choice.left_out, scenario)

    @contextmanager
    def _subject(self, station: Station, engines: int) -> Iterator[Subject]:
        traffic, model = self.traffic, self.traffic.model
        with connector(station.connector, pool_bytes(traffic, station), model) as way:
            made = arguments(model, traffic.sizes.most_tokens, engines, way.arguments)
            made["num_gpu_blocks_override"] = traffic.sizes.engine_tokens // model.block_tokens
            made["max_num_batched_tokens"] = traffic.sizes.batch_tokens
            made["enable_prefix_caching"] = station.prefix_cache
            if self.plan.graphs:
                made |= decoding_with_graphs(traffic.sizes.at_a_time, traffic.sizes.own_tokens)
            config = made.get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
            # loads are what is watched, whether they pay or not
            if station.decodes and "kvkeep.address" in config:
                config["kvkeep.load_when"] = "always"
            spare = self.spares.get(station)
            with LoadedEngine(
                station.connector, made, self.environment, spare=spare, ready_when=way.ready_when
            ) as engine:
                yield Subject(station, engine, way)

    # -- what came out

    def result(self) -> dict[str, Any]:
        device, model = self.plan.choice.device, self.traffic.model
        measured = [
            (name, scenario)
            for scenario in self.plan.scenarios
            for name in self.plan.choice.connectors
            if len(self.said.get((name, scenario), ())) == self.plan.repeats
        ]
        sizes = self.traffic.sizes
        return {
            "device": device,
            **({"gpu": gpu_name()} if device == "cuda" else {}),
            "model": model.description,
            "vllm": self.vllm,
            "seconds": self.plan.seconds,
            "repeats": self.plan.repeats,
            "interleaved": self.plan.interleave,
            "graphs": self.plan.graphs,
            "at_a_time": sizes.at_a_time,
            "prefixes": sizes.prefixes,
            "engine_blocks": sizes.engine_tokens // model.block_tokens,
            "decoders": sizes.decoders,
            "rows": [self._row(*each) for each in measured],
            "ratios": [self._ratios(*each) for each in measured if each[0] != "none"],
            "left_out": dict(self.plan.choice.left_out),
            "targets": dict(TARGETS),
        }

    def _row(self, name: str, scenario: str) -> dict[str, Any]:
        """Medians of the repeats, but all that failed."""
        mine = self.said[name, scenario]
        figures = {
            key: median([each[key] for each in mine if each[key] is not None], 3)
            for key in mine[0]
            if key != "answers"
        }
        counted = {"failed": sum(each["failed"] for each in mine), "requests": mine[0]["requests"]}
        same = [
            self._same(ours, none)
            for ours, none in zip(mine, self.said["none", scenario], strict=True)
        ]
        return {
            "connector": name,
            "scenario": scenario,
            **figures,
            **counted,
            "same_answers": median(same, 3),
        }

    def _same(self, ours: dict[str, Any], none: dict[str, Any]) -> float:
        """The share of requests that both answered, and alike."""
        both = ours["answers"].keys() & none["answers"].keys()
        alike: int = sum(ours["answers"][at] == none["answers"][at] for at in both)
        return alike / max(len(both), 1)

    def _ratios(self, name: str, scenario: str) -> dict[str, Any]:
        """Against none, in the same repeat: medians, and what they are the medians of."""
        if scenario in DECODE:
            figures = ("itl_p50", "itl_p99", "itl_decode_p50", "itl_decode_p99")
            kinds = {f"{figure}_ratio": f"{figure}_ms" for figure in figures}
        else:
            kinds = {"output_ratio": "output_tokens_per_s", "total_ratio": "total_tokens_per_s"}
        kinds |= {"ttft_mean_ratio": "ttft_mean_ms"}
        repeats = list(zip(self.said[name, scenario], self.said["none", scenario], strict=True))
        every = {
            ratio: [
                mine[key] / none[key] if mine[key] and none[key] else None for mine, none in repeats
            ]
            for ratio, key in kinds.items()
        }
        medians = {
            ratio: median([each for each in own if each is not None], 3)
            for ratio, own in every.items()
        }
        return {
            "connector": name,
            "scenario": scenario,
            **medians,
            **{f"{ratio}s": rounded(own, 3) for ratio, own in every.items()},
        }


def _told(figures: dict[str, Any]) -> str:
    found = figures["cached_share"]
    cached = "" if found is None else f", {found:.0%} of prefixes found"
    if "samples" in figures:
        between = " ms, p99 ".join(
            "-" if figures[key] is None else f"{figures[key]:,.2f}"
            for key in ("itl_p50_ms", "itl_p99_ms")
        )
        return f"{between} ms between tokens{cached}"
    rate, count = figures["output_tokens_per_s"], figures["requests"]
    return f"{count} requests in {figures['seconds']:,.1f} s, {rate:,.1f} tokens/s{cached}"
