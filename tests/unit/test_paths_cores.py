"""The pure parts of paths: grid, weights, the book of phases, the quorum, the router, shards."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from gatheringroom import Room
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from potluck.errors import ConfigurationError
from potluck.monitor.dashboard.pages.paths import describe, picture
from potluck.monitor.pathview import view_paths
from potluck.monitor.view import GroupRow
from potluck.optim.methods.quorum import AdaptiveGrace
from potluck.paths.cutting import cut, cut_for
from potluck.paths.features import bag_of_tokens, prefixes_of
from potluck.paths.grid import Grid, path_name, read_path
from potluck.paths.modulepart import coordinating_module
from potluck.paths.phasebook import (
    PhaseBook,
    Report,
    check_same_paths,
    finish,
    is_all_done,
    new_book,
    open_modules,
    take,
)
from potluck.paths.phasequorum import PhaseQuorum
from potluck.paths.router import fit_discriminative, fit_kmeans, purity
from potluck.paths.sharding import (
    Shards,
    check_documents,
    check_routing,
    read_assignment,
    read_routing,
    routed,
    write_routing,
)
from potluck.paths.weighing import MOST_WEIGHT, alphas, phase_weight, step_factor
from potluck.recipes.reference import FileRef, RecipeRef
from potluck.recipes.stdlib_lm import Config, StdlibLM
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.coordinator.trigger import ReadySender
from potluck.testing.languages import WordModel, languages
from potluck.training.manifest.manifest import DiLoCoSettings, Manifest, PathSpec, Route, Settings
from potluck.training.manifest.organising import taken_over
from potluck.training.manifest.runfile import read_run_file
from potluck.training.trainer.pathuse import prepare, with_route
from potluck.training.trainer.pathwork import paths_of, route_at

LEVELS = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
SHARED = st.sampled_from([(), ("embedding",), ("head",), ("embedding", "head")])


# Levels, modules, paths


@given(LEVELS, SHARED)
def test_each_path_takes_one_module_per_level(levels: tuple[int, ...], shared: tuple[str, ...]) -> None:
    grid = Grid(levels, shared)
    assert len(set(grid.paths)) == math.prod(levels) == grid.num_paths
    for path in grid.paths:
        modules = grid.modules_of(path)
        parts = [part for module in modules for part in grid.parts_of(module)]
        assert sorted(parts) == sorted(["embedding", "head", *(f"level-{n}" for n in range(len(levels)))])
        assert all(path in grid.paths_through(module) for module in modules)
        assert grid.paths[grid.number_of(path)] == path == read_path(path_name(path))
    for level, count in enumerate(levels):
        for index in range(count):
            assert len(grid.paths_through(f"level-{level}-{index}")) == grid.num_paths // count


@pytest.mark.parametrize("levels", [(), (0,), (65, 65), (1,) * 9])
def test_levels_that_make_no_paths_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="levels"):
        Grid(levels)


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no path \(2, 0\): they go from \(0, 0\) to \(1, 1\)"):
        Grid((2, 2)).number_of((2, 0))
    with pytest.raises(ConfigurationError, match="names no path"):
        read_path("one")


def test_a_model_is_cut_by_its_layers_by_marks_or_as_the_recipe_says() -> None:
    model = WordModel(layers=4)
    parts = cut(model, 2)
    assert parts["embedding"] == ("words.weight",)
    assert parts["level-1"] == ("blocks.2.weight", "blocks.2.bias", "blocks.3.weight", "blocks.3.bias")
    assert parts["head"] == ("head.weight", "head.bias")
    said = cut(model, 2, lambda level: [["blocks.0"], ["blocks.3"]][level])
    assert said["level-0"] == ("blocks.0.weight", "blocks.0.bias")
    model.blocks[1].path_level = 0  # type: ignore[assignment]
    model.blocks[2].path_level = 1  # type: ignore[assignment]
    assert cut(model, 2)["level-1"] == ("blocks.2.weight", "blocks.2.bias")


def test_a_model_of_few_blocks_is_cut_between_them_and_not_inside() -> None:
    model = StdlibLM(Config(layers=2, width=16, heads=2)).model()
    parts = cut(model, 2)
    assert {name.split(".")[0] + name.split(".")[1] for name in parts["level-0"]} == {"blocks0"}
    assert {name.split(".")[0] + name.split(".")[1] for name in parts["level-1"]} == {"blocks1"}
    assert not any(name.startswith("blocks") for name in (*parts["embedding"], *parts["head"]))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))  # no two neighbours are alike
    assert cut(plain, 2)["level-1"] == ("2.weight", "2.bias")


def test_levels_that_do_not_fit_the_recipe_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="longest list of layers has 2"):
        cut(WordModel(layers=2), 3)
    with pytest.raises(ConfigurationError, match="which its model does not have"):
        cut(WordModel(), 1, lambda _level: ["layers.7"])
    model = WordModel()
    model.blocks[0].path_level = 2  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="marked for level 2"):
        cut(model, 2)
    with pytest.raises(ConfigurationError, match="module shared would have no parameters: the model has no embedding"):
        cut_for(Grid((2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lambda _level: ())
    with pytest.raises(ConfigurationError, match="longest list of layers has 0"):
        cut(nn.Linear(2, 2), 1)


# Weights


@given(LEVELS, st.data(), st.sampled_from(["normalised", "raw"]))
def test_a_rounds_mean_times_the_factor_is_the_formula(levels: tuple[int, ...], data: st.DataObject, kind: str) -> None:
    grid = Grid(levels)
    tokens = {path: float(data.draw(st.integers(1, 1000))) for path in grid.paths}
    module = data.draw(st.sampled_from(grid.modules))
    through = grid.paths_through(module)
    deltas = {path: data.draw(st.floats(-1, 1)) for path in through}
    weights = alphas(grid, tokens, module, kind)  # type: ignore[arg-type]
    direct = math.sqrt(len(through)) * sum(weights[path] * deltas[path] for path in through)
    whole = sum(tokens[path] for path in through)
    mean = sum(tokens[path] * deltas[path] for path in through) / whole
    all_tokens = sum(tokens.values())
    shares = [phase_weight(tokens[path], all_tokens) for path in through]
    factor = step_factor(
        phases=len(through),
        round_weight=sum(shares),
        num_paths=len(through),
        kind=kind,  # type: ignore[arg-type]
    )
    assert mean * factor == pytest.approx(direct, abs=1e-9)
    if kind == "normalised":
        assert sum(weights.values()) == pytest.approx(1.0)


def test_paths_count_as_their_tokens_say_and_nobody_for_more_than_the_run_has() -> None:
    coordinator = coordinating_module(GatherConfig(), num_paths=3, min_phases=1, grace_seconds=1.0)
    room = Room(weight_cap=coordinator.gather.weight_cap, most_weight=coordinator.gather.most_weight)
    tokens = {"small": 10, "middle": 90, "large": 9900}
    for peer, count in tokens.items():
        room.add(peer, weight=phase_weight(count, 10_000), phases=1.0)
    given = {member.peer: (member.weight, member.claimed) for member in room.plan().members}
    assert given == {peer: (count / 10_000, 0.0) for peer, count in tokens.items()}
    room.add("liar", weight=1e6, phases=1e6, card={"trusted": True})
    [liar] = [member for member in room.plan().members if member.peer == "liar"]
    assert (liar.weight, liar.claimed) == (MOST_WEIGHT, 1e6)
    most = {"phases": 1e6, "round_weight": 1e6, "num_paths": 3}
    assert step_factor(**most) == math.sqrt(3)
    assert step_factor(**most, kind="raw") == pytest.approx(math.sqrt(3), rel=1e-5)


# Phases


def report(book: PhaseBook, peer: str, **more: object) -> Report:
    return Report(token=book.leases[peer].token, **more)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(st.integers(0, 10**6), LEVELS, st.integers(1, 7))
def test_no_phase_counts_twice_whoever_comes_and_goes(seed: int, levels: tuple[int, ...], most: int) -> None:
    randomness, grid = random.Random(seed), Grid(levels)
    book, present, counted, stale = new_book(grid), {"p0"}, Counter[tuple[int, int]](), dict[str, Report]()
    for step in range(200):
        peer = f"p{randomness.randrange(most)}"
        match randomness.randrange(6):
            case 0:
                present.add(peer)
            case 1 if len(present) > 1:
                present.discard(peer)
                if peer in book.leases:
                    stale[peer] = report(book, peer)
            case 2 if peer in stale:  # it was believed dead, and comes with what it has
                held = book.leases.get(peer)
                before = book
                book, share = finish(book, peer, stale.pop(peer), present=present)
                if held is not None and share:
                    counted[held.path, held.phase] += share
                elif not share:
                    assert book is before
            case 3 | 4 if peer in book.leases and peer in present:
                held = book.leases[peer]
                book, share = finish(book, peer, report(book, peer), present=present)
                assert 0 < share <= 1
                counted[held.path, held.phase] += share
            case _ if peer in present:
                book, lease = take(book, peer, present=present, now=float(step))
                if lease is not None:
                    assert lease.phase == book.entries[lease.path].done
                    assert book.leases[peer] == lease
    assert all(share <= 1.0 + 1e-9 for share in counted.values())
    for number, entry in enumerate(book.entries):
        assert {phase for path, phase in counted if path == number} == set(range(entry.done))


def test_fewer_peers_than_paths_take_turns_and_more_share() -> None:
    grid = Grid((2, 2))
    book, seen = new_book(grid), []
    for _ in range(8):
        book, lease = take(book, "alone", present={"alone"})
        assert lease is not None
        seen.append((lease.path, lease.phase))
        book, share = finish(book, "alone", report(book, "alone"), present={"alone"})
        assert share == 1.0
    assert sorted(seen) == [(path, phase) for path in range(4) for phase in range(2)]
    book, present = new_book(grid), {f"p{n}" for n in range(6)}
    for peer in sorted(present):
        book, lease = take(book, peer, present=present)
        assert lease is not None
    assert sorted(Counter(lease.path for lease in book.leases.values()).values()) == [1, 1, 2, 2]
    sharing = book.holders(0)
    book, first = finish(book, sharing[0], report(book, sharing[0]), present=present)
    book, lease = take(book, sharing[0], present=present)
    assert lease is not None
    assert lease.phase <= 1
    book, second = finish(book, sharing[1], report(book, sharing[1]), present=present)
    assert (first, second) == (0.5, 0.5)
    assert book.entries[0].done == 1


def test_a_lease_comes_back_when_its_peer_is_gone_and_its_work_does_not_count() -> None:
    book = new_book(Grid((2,)))
    book, lost = take(book, "a", present={"a", "b"})
    old = report(book, "a")
    book, _ = take(book, "b", present={"a", "b"})
    book, again = take(book, "c", present={"b", "c"})
    assert lost is not None
    assert again is not None
    assert (again.path, again.phase) == (lost.path, lost.phase)
    book, share = finish(book, "a", old, present={"a", "b", "c"})
    assert share == 0.0
    assert book.entries[lost.path].returned == 1


def test_paths_that_stopped_or_are_done_are_given_to_nobody() -> None:
    grid = Grid((2,))
    book, _ = take(new_book(grid), "a", present={"a"})
    book, _ = finish(book, "a", report(book, "a", is_over=True), present={"a"})
    for phase in range(3):
        book, lease = take(book, "a", present={"a"}, end=3)
        assert lease is not None
        assert (lease.path, lease.phase) == (1, phase)
        book, _ = finish(book, "a", report(book, "a"), present={"a"})
    book, lease = take(book, "a", present={"a"}, end=3)
    assert lease is None
    assert is_all_done(book, 3)
    with pytest.raises(ConfigurationError, match="levels"):
        check_same_paths(book, (3,))


def test_a_module_is_open_while_a_phase_of_it_is_free() -> None:
    grid = Grid((2, 2))
    book, _ = take(new_book(grid), "a", present={"a", "b"})
    book, _ = finish(book, "a", report(book, "a"), present={"a", "b"})
    assert set(open_modules(book, grid)) == {"shared", "level-0-0", "level-1-0"}
    book, _ = take(book, "b", present={"a", "b"})  # (0, 1)
    assert set(open_modules(book, grid)) == {"shared", "level-1-0"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_256_paths_advance_with_64_peers_that_come_and_go(seed: int) -> None:
    """In virtual time: peers of speed 1 : 10 train, die in the middle, and come back; leases return with the roster."""
    randomness, grid = random.Random(seed), Grid((16, 16))
    book, present, counted = new_book(grid), set[str](), Counter[tuple[int, int]]()
    speed = {f"p{n}": randomness.uniform(1.0, 10.0) for n in range(64)}
    events = [(randomness.uniform(0, 5), peer, "join", 0) for peer in speed]
    heapq.heapify(events)
    deaths, end, now = 0, 4, 0.0
    while events and not is_all_done(book, end):
        now, peer, what, token = heapq.heappop(events)
        if what == "join" or (what == "ask" and peer in present):
            present.add(peer)
            book, lease = take(book, peer, present=present, now=now, end=end)
            if lease is None:
                heapq.heappush(events, (now + 1.0, peer, "ask", 0))
            elif randomness.random() < 0.05:  # dies in the middle of the phase; the roster knows it 3 s later
                deaths += 1
                heapq.heappush(events, (now + speed[peer] / 2 + 3.0, peer, "gone", 0))
            else:
                heapq.heappush(events, (now + speed[peer], peer, "done", lease.token))
        elif what == "gone":
            present.discard(peer)
            heapq.heappush(events, (now + randomness.uniform(1, 30), peer, "join", 0))
        elif what == "done":
            held = book.leases[peer]
            book, share = finish(book, peer, Report(token=token), present=present)
            assert share
            counted[held.path, held.phase] += share
            heapq.heappush(events, (now, peer, "ask", 0))
    assert deaths > 10
    assert all(entry.done == end for entry in book.entries)
    assert sorted(counted) == [(path, phase) for path in range(256) for phase in range(end)]
    assert all(share == 1.0 for share in counted.values()), "64 peers never share 256 paths"
    assert len(book.leases) <= 64


# When a module's round starts


def ready(**phases: float) -> list[ReadySender]:
    return [
        ReadySender(peer=peer, weight=1.0, since=float(number), phases=count)
        for number, (peer, count) in enumerate(phases.items())
    ]


def test_a_round_counts_phases_and_not_peers() -> None:
    grace = AdaptiveGrace(least_seconds=2.0, most_seconds=8.0)
    quorum = PhaseQuorum(num_paths=4, min_phases=2, grace=grace)
    everybody = frozenset("abcdefgh")
    assert quorum.due_at(ready(a=1.0), everybody) is None
    assert quorum.due_at(ready(a=1.0, b=1.0), everybody) == 1.0 + grace.seconds
    assert quorum.due_at(ready(a=3.0, b=1.0), everybody) == -math.inf
    assert quorum.due_at(ready(a=1.0, b=0.5, c=2.0, d=0.5), everybody) == -math.inf
    with pytest.raises(ConfigurationError, match="min_phases=5"):
        PhaseQuorum(num_paths=4, min_phases=5)


# The router, and shards


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_four_languages_are_told_apart_by_their_first_tokens(seed: int) -> None:
    documents, truth = languages(400, seed=seed, length=40)
    features = bag_of_tokens(prefixes_of(documents, 32))
    assert purity(fit_kmeans(features, 4, seed).route(features), truth) >= 0.99


def test_a_discriminative_router_learns_which_path_is_best() -> None:
    documents, truth = languages(400, length=40)
    features = bag_of_tokens(prefixes_of(documents, 32))
    losses = 1.0 + torch.rand(400, 4) - 2.0 * nn.functional.one_hot((truth + 1) % 4, 4)
    router = fit_discriminative(features, losses)
    unseen, of = languages(100, seed=9, length=40)
    found = router.route(bag_of_tokens(prefixes_of(unseen, 32)))
    assert float((found == (of + 1) % 4).float().mean()) >= 0.98
    with pytest.raises(ConfigurationError, match="400 documents have features, and 3 have losses"):
        fit_discriminative(features, losses[:3])


def test_documents_are_sharded_and_the_file_says_the_same(tmp_path: Path) -> None:
    grid, (documents, _) = Grid((2, 2)), languages(200)
    router = fit_kmeans(bag_of_tokens(prefixes_of(documents, 8)), 4)
    routing = routed(grid, documents, router, prefix=8, kind="kmeans")
    shards = Shards(grid, routing)
    everything = sorted(d for path in range(4) for d in shards.training[path] + shards.validation[path])
    assert everything == list(range(200))
    assert all(shards.validation[path] for path in range(4))
    assert shards.all_tokens == sum(shards.tokens(path) for path in range(4))
    write_routing(routing, tmp_path / "routing.json")
    again = read_routing(tmp_path / "routing.json")
    assert again == routing
    assert again.router is not None
    assert again.router.route(bag_of_tokens(prefixes_of(documents, 8))).tolist() == routing.paths
    check_documents(again, documents)
    with pytest.raises(ConfigurationError, match="its data differ"):
        check_documents(again, [*documents[1:], documents[0]])
    with pytest.raises(ConfigurationError, match="this machine has 199 documents"):
        check_documents(again, documents[1:])
    with pytest.raises(ConfigurationError, match="prepare` again"):
        check_routing(Grid((4,)), again)


def test_starving_paths_are_warned_of() -> None:
    grid, (documents, truth) = Grid((2,)), languages(200, 2)
    paths = [0 if language or number > 20 else 1 for number, language in enumerate(truth.tolist())]
    shards = Shards(grid, read_assignment_of(grid, documents, paths))
    assert "path (1) starves" in shards.warnings()[0]


def read_assignment_of(grid: Grid, documents: list[torch.Tensor], paths: list[int]) -> object:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.json"
        file.write_text(json.dumps(paths))
        return read_assignment(grid, documents, file, prefix=8)


def test_a_routing_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    grid, (documents, _) = Grid((2, 2)), languages(40)
    file = tmp_path / "mine.json"
    for content, message in {
        "{}": "is no list of paths",
        json.dumps([0] * 39): "routes 39 documents, and the recipe has 40",
        json.dumps([7] * 40): "sends document 0 to path 7, and there are 4",
        json.dumps([[2, 0]] * 40): r"no path \(2, 0\)",
        json.dumps([0, 1, 2] * 13 + [0]): r"path \(1, 1\) would be empty",
    }.items():
        file.write_text(content)
        with pytest.raises(ConfigurationError, match=message):
            read_assignment(grid, documents, file, prefix=8)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_assignment(grid, documents, tmp_path / "none.json", prefix=8)
    with pytest.raises(ConfigurationError, match="prepare"):
        read_routing(tmp_path / "none.json")


def test_documents_shorter_than_the_prefix_and_too_few_are_refused() -> None:
    documents, _ = languages(10)
    with pytest.raises(ConfigurationError, match="1 of 11 documents have no more than the 8 tokens"):
        prefixes_of([*documents, torch.arange(8)], 8)
    with pytest.raises(ConfigurationError, match="nothing to route"):
        prefixes_of([], 8)
    with pytest.raises(ConfigurationError, match="2 documents cannot fill 4 paths"):
        fit_kmeans(bag_of_tokens(prefixes_of(documents[:2], 8)), 4)


def test_what_a_page_and_a_table_show_of_paths() -> None:
    grid = Grid((2, 2))
    book, _ = take(new_book(grid), "a", present={"a", "b"})
    done = report(book, "a", loss=1.5, validation=1.25, tokens=640)
    book, _ = finish(book, "a", done, present={"a", "b"})
    book, _ = take(book, "b", present={"a", "b"})
    groups = [GroupRow(name="level-0-0", epoch=3, num_members=2, coordinator="Ada", committed_at=90.0)]
    view = view_paths(grid, book, groups, str.upper, hub_now=100.0)
    assert view.paths[0].as_table()["trained by"] == "nobody now"
    assert view.paths[1].trainers == ("B",)
    assert "1 phases, 640 tokens, loss 1.5000, validation 1.2500" in describe(view.paths[0])
    [row] = [row for row in view.modules if row.module == "level-0-0"]
    assert (row.epoch, row.seconds_since, row.paths) == (3, 10.0, 2)
    assert picture(view)["series"][0]["data"] == [[0, 0, 1.25]]
    assert len(json.dumps(view.as_json())) > 100
    assert view_paths(grid, None, [], str, 0.0).paths[0].phases == 0


# run.toml and the manifest


def manifest_with_paths(**options: object) -> Manifest:
    first = Settings(training=DiLoCoSettings())
    route = Route(sha256="0" * 64)
    ref = RecipeRef(name="stdlib-lm")
    return Manifest(run="grove", recipe=ref, settings=(first,), paths=PathSpec(**options), routes=(route,))  # type: ignore[arg-type]


def test_a_new_routing_counts_from_one_phase_on_for_all_paths() -> None:
    manifest = manifest_with_paths()
    ref = FileRef(name="paths-routing-7.json", sha256="1" * 64, num_bytes=10)
    changed = with_route(manifest, ref, 7)
    assert [route_at(changed, phase).sha256[0] for phase in (0, 6, 7, 100)] == ["0", "0", "1", "1"]
    assert changed.files == (ref,)
    assert taken_over(changed, manifest, epoch=3, by="", at=0.0) is None, "a host that starts again keeps it"
    again = with_route(changed, FileRef(name="paths-routing-5.json", sha256="2" * 64, num_bytes=10), 5)
    assert [route_at(again, phase).sha256[0] for phase in (4, 5, 8)] == ["0", "2", "2"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("layers = 2", "layers = 1"), "levels has 2 levels, and the model's longest list of layers has 1"),
        (("route_prefix = 8", "route_prefix = 100000"), "take a smaller route_prefix"),
        (('route = "kmeans"', 'route = "mine.json"'), "mine.json cannot be read"),
        (("[paths]", "[patience]\n[paths2]"), "paths2"),
    ],
)
def test_what_does_not_fit_is_said_before_the_run_and_nothing_is_lost(
    edit: tuple[str, str], message: str, tmp_path: Path
) -> None:
    text = """\
        name = "grove"
        recipe = "stdlib-lm"
        [model]
        layers = 2
        width = 16
        heads = 2
        [paths]
        levels = [2, 2]
        route = "kmeans"
        route_prefix = 8
        [training]
        algorithm = "diloco"
        """
    (tmp_path / "run.toml").write_text(text.replace(*edit))
    (tmp_path / "paths-routing.json").write_text("what was routed before")
    with pytest.raises(ConfigurationError, match=message):
        prepare(read_run_file(tmp_path / "run.toml"), tmp_path)
    assert (tmp_path / "paths-routing.json").read_text() == "what was routed before"


def test_what_run_toml_says_of_paths_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="at most"):
        PathSpec(levels=(100, 100))
    with pytest.raises(ConfigurationError, match="route is empty"):
        PathSpec(route="")
    manifest = manifest_with_paths()
    with pytest.raises(ConfigurationError, match="algorithm"):
        replace(manifest, settings=(Settings(),))
    with pytest.raises(ConfigurationError, match="num_fragments"):
        replace(manifest, settings=(Settings(training=DiLoCoSettings(num_fragments=2)),))
    with pytest.raises(ConfigurationError, match="has no paths"):
        paths_of(replace(manifest, paths=None))
