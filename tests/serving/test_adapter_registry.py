"""Owns: which adapter folders may be served; the registry's versions and its errors; a served name means one version
of one node; publishing and retiring as the server sees it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.fake_vllm import FakeVllm, running
from support.lora_files import write_adapter

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import ServeOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_checks import check_adapter_folder, check_adapter_name, model_layers
from marft_bridge.serving.adapter_registry import AdapterRegistry, publish, retire, safe_node_name
from marft_bridge.serving.vllm_server import ModelServer

BASE = "b" * 64
Q_PROJ = {"layers.0.self_attn.q_proj": (6, 4)}


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    return AdapterRegistry(tmp_path / "adapters", BASE)


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with running(FakeVllm()) as server:
        yield server


@pytest.fixture
def server(fake: FakeVllm, registry: AdapterRegistry, tmp_path: Path) -> Iterator[ModelServer]:
    options = ServeOptions(attach=fake.url)
    with ModelServer.start(options, tmp_path / "no model", adapters=registry.root, log=tmp_path / "log") as attached:
        yield attached


def registered(registry: AdapterRegistry, node: str, version: int, parent: int | None = None) -> Path:
    folder = write_adapter(registry.new_folder(node, version), Q_PROJ, seed=version)
    registry.register(node, version, parent, {"kl": 0.5})
    return folder


# Folders


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_file(
        {
            "model.layers.0.self_attn.q_proj.weight": np.zeros((6, 4), np.float32),
            "model.layers.0.self_attn.o_proj.weight": np.zeros((4, 6), np.float32),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path / "adapters"


def check(folder: Path, root: Path, served: tuple[str, ...] | None = None) -> Path:
    return check_adapter_folder(folder, root, served, model_layers(root.parent))


def test_an_adapter_that_fits_is_answered_with_its_real_path(root: Path) -> None:
    folder = write_adapter(root / "a", Q_PROJ)
    (root / "link").symlink_to(folder)
    assert check(root / "link", root, ("q_proj",)) == folder.resolve()


def test_a_path_outside_the_root_is_refused_however_it_is_written(root: Path, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", Q_PROJ)
    root.mkdir()
    (root / "link").symlink_to(outside)
    for path in (outside, root / ".." / "outside", root / "link", root):
        with pytest.raises(ServingError, match="not inside the adapter root"):
            check(path, root)


def test_weights_that_point_outside_the_root_are_refused(root: Path, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", Q_PROJ)
    folder = write_adapter(root / "a", Q_PROJ)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    with pytest.raises(ServingError, match="points outside"):
        check(folder, root)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(root: Path, name: str) -> None:
    folder = write_adapter(root / "a", Q_PROJ)
    (folder / name).unlink()
    with pytest.raises(ServingError, match=re.escape(f"has no {name}")):
        check(folder, root)


@pytest.mark.parametrize("name", ["adapter_model.bin", "optimizer.pt"])
def test_a_folder_with_a_pickle_is_refused(root: Path, name: str) -> None:
    folder = write_adapter(root / "a", Q_PROJ)
    (folder / name).touch()
    with pytest.raises(ServingError, match=f"holds {name}"):
        check(folder, root)


def test_layers_that_the_server_would_drop_are_refused(root: Path) -> None:
    folder = write_adapter(root / "a", Q_PROJ | {"layers.0.self_attn.o_proj": (4, 6)})
    assert check(folder, root, None) == folder.resolve()
    with pytest.raises(ServingError, match="changes o_proj, but the server was started for q_proj only"):
        check(folder, root, ("q_proj",))


def test_an_adapter_of_another_width_is_refused(root: Path) -> None:
    folder = write_adapter(root / "a", {"layers.0.self_attn.q_proj": (6, 5)})
    with pytest.raises(ServingError, match=r"another base model: .*q_proj is 6 x 4 here, 6 x 5 in the adapter"):
        check(folder, root)


def test_an_adapter_of_a_deeper_model_is_refused(root: Path) -> None:
    folder = write_adapter(root / "a", Q_PROJ | {"layers.1.self_attn.q_proj": (6, 4)})
    with pytest.raises(ServingError, match=r"layers\.1\.self_attn\.q_proj, which the base model has not"):
        check(folder, root)


def test_weights_that_are_no_safetensors_are_refused(root: Path) -> None:
    folder = write_adapter(root / "a", Q_PROJ)
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x04 pickled")
    with pytest.raises(ServingError, match="not a safetensors file"):
        check(folder, root)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a\n", "é"])
def test_a_name_that_is_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(ServingError, match="may hold only"):
        check_adapter_name(name)


# Registry


@pytest.mark.slow
@given(st.text(min_size=1), st.text(min_size=1))
def test_two_nodes_never_share_a_served_name(one: str, other: str) -> None:
    names = {check_adapter_name(AdapterRegistry.served_name(node, 3)) for node in (one, other)}
    assert len(names) == len({one, other})


def test_plain_node_names_stay_readable_and_subgraph_paths_become_safe() -> None:
    assert AdapterRegistry.served_name("planner", 7) == "planner@7"
    assert AdapterRegistry.served_name("team/planner", 7) == "team.2Fplanner@7"
    assert safe_node_name("..") == ".2E.2E"
    assert safe_node_name("writer:router") == "writer.3Arouter"


def test_names_of_any_length_fit_a_file_system_and_stay_apart() -> None:
    safe_names = {safe_node_name("文" * length) for length in range(1, 120)}
    assert len(safe_names) == 119
    assert max(map(len, safe_names)) == 200


def test_a_registered_version_is_found_with_its_hash_and_parent(registry: AdapterRegistry) -> None:
    registered(registry, "planner", 1)
    folder = registered(registry, "planner", 2, parent=1)
    row = registry.get("planner", 2)
    assert row.sha256 == hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert (row.node, row.version, row.parent, row.path) == ("planner", 2, 1, str(folder))
    assert (row.base_sha256, row.metrics) == (BASE, {"kl": 0.5})
    assert registry.latest("planner") == row
    assert stat.S_IMODE((folder / "marft.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_versions_are_ordered_by_number(registry: AdapterRegistry) -> None:
    for version in (10, 9, 1):
        registered(registry, "planner", version)
    assert registry.versions("planner") == [1, 9, 10]
    latest = registry.latest("planner")
    assert latest is not None
    assert latest.version == 10


def test_a_node_without_versions_has_no_latest_one(registry: AdapterRegistry) -> None:
    assert registry.versions("planner") == []
    assert registry.latest("planner") is None


def test_an_unknown_version_is_said_with_those_that_exist(registry: AdapterRegistry) -> None:
    with pytest.raises(ServingError, match=r"^node 'planner' has no adapter v3; published: none$"):
        registry.get("planner", 3)
    registered(registry, "planner", 1)
    registered(registry, "planner", 2)
    with pytest.raises(ServingError, match=r"^node 'planner' has no adapter v3; published: v1, v2$"):
        registry.get("planner", 3)


def test_the_base_model_is_no_version(registry: AdapterRegistry) -> None:
    with pytest.raises(ServingError, match="versions count from 0"):
        registry.new_folder("planner", -1)


def test_an_interrupted_version_does_not_exist_and_its_folder_is_taken_again(registry: AdapterRegistry) -> None:
    folder = write_adapter(registry.new_folder("planner", 1), Q_PROJ)
    assert registry.versions("planner") == []
    assert registry.new_folder("planner", 1) == folder
    assert list(folder.iterdir()) == []


def test_a_version_is_never_overwritten(registry: AdapterRegistry) -> None:
    folder = registered(registry, "planner", 1)
    before = (folder / "marft.json").read_bytes()
    with pytest.raises(ServingError, match="already has adapter v1"):
        registry.new_folder("planner", 1)
    with pytest.raises(ServingError, match="already has adapter v1"):
        registry.register("planner", 1, None, {})
    assert (folder / "marft.json").read_bytes() == before


def test_a_version_needs_weights_and_a_known_parent(registry: AdapterRegistry) -> None:
    registry.new_folder("planner", 2)
    with pytest.raises(ServingError, match=r"no adapter_model\.safetensors"):
        registry.register("planner", 2, None, {})
    write_adapter(registry.new_folder("planner", 2), Q_PROJ)
    with pytest.raises(ServingError, match="has no adapter v1"):
        registry.register("planner", 2, 1, {})
    assert registry.versions("planner") == []


def test_an_adapter_of_another_base_model_is_refused(registry: AdapterRegistry) -> None:
    registered(registry, "planner", 1)
    other = AdapterRegistry(registry.root, "c" * 64)
    with pytest.raises(ServingError, match="another base model"):
        other.get("planner", 1)
    with pytest.raises(ServingError, match="another base model"):
        other.latest("planner")


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"node": "planner", "colour": 1}'])
def test_an_unreadable_record_is_named(registry: AdapterRegistry, record: str) -> None:
    folder = registered(registry, "planner", 1)
    (folder / "marft.json").write_text(record)
    with pytest.raises(ServingError, match=re.escape(str(folder))):
        registry.get("planner", 1)


def test_a_registry_that_was_moved_finds_its_files(registry: AdapterRegistry, tmp_path: Path) -> None:
    registered(registry, "planner", 1)
    registry.root.rename(tmp_path / "elsewhere")
    row = AdapterRegistry(tmp_path / "elsewhere", BASE).get("planner", 1)
    assert Path(row.path, "adapter_model.safetensors").is_file()


# Publishing


def test_publishing_serves_the_version_and_retiring_ends_it(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm
) -> None:
    folder = registered(registry, "team/planner", 1)
    assert publish(server, registry, "team/planner", 1) == "team.2Fplanner@1"
    assert {name: Path(path).resolve() for name, path in fake.adapters.items()} == {"team.2Fplanner@1": folder}
    assert server.adapter_names() == ["team.2Fplanner@1"]
    assert publish(server, registry, "team/planner", 1) == "team.2Fplanner@1"  # again changes nothing
    retire(server, "team/planner", 1)
    assert server.adapter_names() == []
    with pytest.raises(ServingError, match="cannot be found"):
        retire(server, "team/planner", 1)


def test_weights_that_changed_after_registration_are_not_served(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm
) -> None:
    write_adapter(registered(registry, "planner", 1), Q_PROJ, seed=99)
    with pytest.raises(
        ServingError, match=r"adapter_model\.safetensors' is not what was registered .*put the file back"
    ):
        publish(server, registry, "planner", 1)
    assert fake.adapters == {}


@pytest.mark.parametrize(
    "change", [lambda text: text.replace('"lora_alpha": 32', '"lora_alpha": 64'), lambda text: text[:-5]]
)
def test_a_configuration_that_changed_after_registration_is_not_served(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm, change: Callable[[str], str]
) -> None:
    config = registered(registry, "planner", 1) / "adapter_config.json"
    before = config.read_text()
    assert change(before) != before
    config.write_text(change(before))
    with pytest.raises(ServingError, match=r"adapter_config\.json' is not what was registered"):
        publish(server, registry, "planner", 1)
    assert fake.adapters == {}


def test_a_version_registered_before_its_configuration_was_hashed_is_served(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm
) -> None:
    record = registered(registry, "planner", 1) / "marft.json"
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "config_sha256"}))
    publish(server, registry, "planner", 1)
    assert set(fake.adapters) == {"planner@1"}


def test_another_folder_under_the_same_name_is_noticed(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm
) -> None:
    registered(registry, "planner", 1)
    fake.adapters["planner@1"] = "/somewhere/else"
    with pytest.raises(ServingError, match="serves /somewhere/else as 'planner@1'"):
        publish(server, registry, "planner", 1)


def test_an_attached_server_serves_the_files_of_this_run_not_those_of_one_before_it_in_the_same_folder(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm, tmp_path: Path
) -> None:
    folder = registered(registry, "planner", 1)
    publish(server, registry, "planner", 1)
    before = fake.adapters["planner@1"]
    shutil.rmtree(registry.root)
    write_adapter(registry.new_folder("planner", 1), Q_PROJ, seed=7)
    registry.register("planner", 1, None, {})
    options = ServeOptions(attach=fake.url)
    with ModelServer.start(options, tmp_path / "no model", adapters=registry.root, log=tmp_path / "log") as again:
        publish(again, registry, "planner", 1)
    now = fake.adapters["planner@1"]
    # vLLM finds cached prefixes by name and path: the same path would be answered from those of the other weights
    assert now != before
    assert Path(now).resolve() == folder.resolve()


def test_what_an_earlier_release_left_in_an_attached_server_is_replaced(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm
) -> None:
    folder = registered(registry, "planner", 1)
    fake.adapters["planner@1"] = str(folder.resolve())  # whose files nobody knows
    publish(server, registry, "planner", 1)
    assert fake.adapters["planner@1"] != str(folder.resolve())
    assert Path(fake.adapters["planner@1"]).resolve() == folder.resolve()


def test_files_that_are_the_same_stay_in_service_for_whoever_else_uses_the_server(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(registry, "planner", 1)
    publish(server, registry, "planner", 1)
    monkeypatch.setattr(ModelServer, "unload_adapter", lambda *_: pytest.fail("another command's calls would fail"))
    options = ServeOptions(attach=fake.url)
    with ModelServer.start(options, tmp_path / "no model", adapters=registry.root, log=tmp_path / "log") as second:
        publish(second, registry, "planner", 1)
    assert set(fake.adapters) == {"planner@1"}


def test_a_version_that_is_served_keeps_its_run_folder_one_to_work_in_and_leaves_nothing_when_deleted(
    server: ModelServer, registry: AdapterRegistry
) -> None:
    folder = registered(registry, "planner", 1)
    publish(server, registry, "planner", 1)
    assert registry.versions("planner") == [1]
    assert list(folder.parent.iterdir()) == [folder]  # beside a node's versions there is nothing else
    (waypoint,) = (path for path in folder.iterdir() if path.name not in registry.files("planner", 1))
    assert list(waypoint.iterdir()) == []
    RunFolder(registry.root.parent).refuse_unsafe()
    registry.delete("planner", 1)
    assert list(folder.parent.iterdir()) == []


def test_the_server_s_refusal_is_passed_on_in_its_own_words(
    server: ModelServer, registry: AdapterRegistry, fake: FakeVllm
) -> None:
    registered(registry, "planner", 1)
    fake.refuse_with = (
        "Call to add_lora method failed: Worker failed with error 'LoRA rank 16 is greater than max_lora_rank 8.', "
        "please check the stack trace above for the root cause"
    )
    with pytest.raises(ServingError, match=r"answered 500: LoRA rank 16 is greater than max_lora_rank 8\.$"):
        publish(server, registry, "planner", 1)


def test_metrics_are_kept_as_json(registry: AdapterRegistry) -> None:
    folder = registered(registry, "planner", 1)
    assert json.loads((folder / "marft.json").read_text())["metrics"] == {"kl": 0.5}
