from __future__ import annotations

from kvkeep.engine.engine import Engine
from kvkeep_lab.chaos.plan import (
    DISK_MOMENTS,
    DISK_RATES,
    FAULTS,
    MANY,
    MOMENTS,
    RATES,
    SERVICE_MOMENTS,
    SERVICE_RATES,
    Arrival,
    DiskItem,
    EngineItem,
    HostsItem,
    Moment,
    Rate,
    draw,
)


def test_a_seed_is_a_plan() -> None:
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_plans_contain_every_fault_sooner_or_later() -> None:
    items = [item for seed in range(60) for item in draw(seed).items]
    assert {item.fault for item in items if isinstance(item, Rate)} == {
        *RATES,
        *DISK_RATES,
        *SERVICE_RATES,
    }
    assert {item.fault for item in items if isinstance(item, Moment)} == {
        *MOMENTS,
        *DISK_MOMENTS,
        *SERVICE_MOMENTS,
    }
    rates, moments = {*RATES, *DISK_RATES, *SERVICE_RATES}, {*MOMENTS, *DISK_MOMENTS}
    assert rates | moments | {*SERVICE_MOMENTS} < set(FAULTS)


def test_about_a_quarter_of_the_plans_has_a_disk() -> None:
    with_disk = [
        seed for seed in range(60) if any(isinstance(item, DiskItem) for item in draw(seed).items)
    ]
    assert 9 <= len(with_disk) <= 21
    for seed in set(range(60)) - set(with_disk):
        assert not any(
            isinstance(item, Rate) and item.fault in DISK_RATES for item in draw(seed).items
        )


def test_about_a_quarter_of_the_plans_has_several_hosts() -> None:
    plans = [draw(seed) for seed in range(80)]
    with_hosts = [plan for plan in plans if any(isinstance(item, HostsItem) for item in plan.items)]
    assert 10 <= len(with_hosts) <= 30
    for plan in with_hosts:
        (hosts,) = (item.hosts for item in plan.items if isinstance(item, HostsItem))
        engines = [item for item in plan.items if isinstance(item, EngineItem)]
        assert {engine.host for engine in engines} == set(range(hosts))
        assert not any(isinstance(item, DiskItem) for item in plan.items)
    for plan in plans:
        if plan not in with_hosts:
            assert not any(
                isinstance(item, Rate | Moment) and item.fault in (*SERVICE_RATES, *SERVICE_MOMENTS)
                for item in plan.items
            )


def test_plans_differ_in_what_matters() -> None:
    plans = [draw(seed) for seed in range(60)]
    engines = [item for plan in plans for item in plan.items if isinstance(item, EngineItem)]
    assert (
        {engine.shared_memory for engine in engines}
        == {engine.kept for engine in engines}
        == {True, False}
    )
    assert {plan.cuts[0].config.tensor_parallel_size for plan in plans} == {1, 2}
    assert {len(plan.cuts) for plan in plans} == {1, 2}
    assert any(not any(isinstance(item, Rate | Moment) for item in plan.items) for plan in plans), (
        "some are calm"
    )


def test_some_plans_have_many_faults_of_one_kind() -> None:
    plans = [draw(seed) for seed in range(60)]
    for fault, (count, _) in MANY.items():
        faults = [
            [getattr(item, "fault", "") for item in plan.items].count(fault) for plan in plans
        ]
        assert any(times >= count for times in faults) and min(faults) == 0


def test_what_a_request_must_answer_is_what_an_engine_without_a_cache_answers() -> None:
    plan = draw(5)
    arrivals = [item for item in plan.items if isinstance(item, Arrival)]
    engine = Engine(plan.cuts[0].model(), plan.cuts[0].config)
    for arrival in arrivals[:5]:
        request = engine.add(list(arrival.tokens), arrival.sampling, salt=arrival.salt)
        while engine.busy:
            engine.step()
        assert tuple(request.output_tokens) == arrival.reference


def test_leaving_items_out_changes_no_other() -> None:
    plan = draw(7)
    shorter = plan.without([1, 3])
    assert shorter.items == tuple(item for at, item in enumerate(plan.items) if at not in (1, 3))
    assert shorter.seed == plan.seed
