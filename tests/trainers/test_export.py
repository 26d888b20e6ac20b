"""Owns: what leaves a run for other tools: a node's adapter as a plain peft folder, and merged as a plain model.

- Both load with peft and transformers and compute what base plus adapter compute; what is not adapted keeps its bits.
- An adapter of another base model, one that does more than add B A, and a folder in use are refused in one line, and
  nothing is left behind.
- The command takes the newest version, or the one that is named or promoted, and exports only what was registered.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.paths import ROOT
from support.tiny_policy import save_tiny_llama
from transformers import AutoModelForCausalLM

from marft_bridge import cli
from marft_bridge.promotion.manifest import Manifest, PromotedAdapter, write_manifest
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trainers.common.files import weights_to_sha256
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.export import export_adapter, export_merged
from trainers.scoring.model import PolicyModel

LORA = LoraOptions(rank=4, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
IDS = torch.tensor([[1, 9, 4, 30, 17, 2, 2, 25]])
COPIED = {"tokenizer.json": '{"version": "1.0"}', "chat_template.jinja": "{{ messages }}", "LICENSE": "none"}


def save_base(folder: Path, seed: int = 0) -> Path:
    """A tiny Llama with the files of a tokenizer, and others that must not travel."""
    save_tiny_llama(folder, seed)
    for name, text in COPIED.items():
        (folder / name).write_text(text)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (folder / "README.md").write_text("the base model")
    return folder


def save_shaken(model_dir: Path, folder: Path, seed: int = 5) -> Path:
    """An adapter that changes what the model says."""
    model = PolicyModel(model_dir, ("actor",), LORA, "cpu", 0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.parameters("actor").items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_adapter("actor", folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_shaken(base, tmp_path_factory.mktemp("adapter") / "actor")
    (folder / "marft.json").write_text("{}")  # as in a run folder
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def by_peft(base: Path, adapter: Path) -> torch.Tensor:
    """What base plus adapter say, by another implementation."""
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Functions


def test_a_merged_model_says_what_base_and_adapter_say(base: Path, adapter: Path, tmp_path: Path) -> None:
    export_merged(base, adapter, tmp_path / "merged")
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, by_peft(base, adapter), atol=1e-5, rtol=0)
    assert float((merged - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max()) > 0.1


def test_a_merged_model_has_the_base_s_own_files_and_no_pickle(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "merged"
    export_merged(base, adapter, out)
    assert files(out) == sorted([*COPIED, "config.json", "generation_config.json", "model.safetensors"])
    for name in (*COPIED, "config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}


def test_a_merged_model_does_not_say_where_its_base_was_loaded_from(base: Path, adapter: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(base, model)
    own = {"config.json": "_name_or_path", "tokenizer_config.json": "name_or_path"}
    for name, key in own.items():
        content = json.loads((model / name).read_text()) if (model / name).exists() else {"kept": "é"}
        (model / name).write_text(json.dumps(content | {key: "/private/jane/models/x"}))
    export_merged(model, adapter, tmp_path / "merged")
    for name, key in own.items():
        before, after = (json.loads((folder / name).read_text()) for folder in (model, tmp_path / "merged"))
        assert after == {field: value for field, value in before.items() if field != key}


def test_in_a_bfloat16_base_the_sum_is_rounded_once_and_the_rest_keeps_its_bits(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    small = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(small)
    sha256 = weights_to_sha256(small)
    rebased = rewritten(adapter, tmp_path / "rebased", metadata={"base_sha256": sha256})
    export_merged(small, rebased, tmp_path / "merged")
    before, after = load_file(small / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = {name for name in before if name.rpartition(".weight")[0].endswith(LORA.target_modules)}
    assert changed == adapted
    assert len(adapted) == 6  # three modules in two layers
    for name in adapted:
        layer = "base_model.model." + name.removesuffix(".weight")
        a, b = (matrices[f"{layer}.lora_{matrix}.weight"].double() for matrix in "AB")
        exact = before[name].double() + 6.0 / 4 * b @ a
        # bfloat16 has 8 significant bits: the nearest number is at most 2^-8 of it away; two roundings can exceed that.
        torch.testing.assert_close(after[name].double(), exact, rtol=2**-8 + 1e-6, atol=1e-8)


def test_a_model_in_several_files_is_merged_file_by_file(base: Path, adapter: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded, max_shard_size="30KB")
    save_file({"stale": torch.ones(1)}, sharded / "consolidated.safetensors")  # another format: not what is loaded
    rebased = rewritten(adapter, tmp_path / "rebased", metadata={"base_sha256": weights_to_sha256(sharded)})
    export_merged(sharded, rebased, tmp_path / "merged")
    shards = [name for name in files(tmp_path / "merged") if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert "consolidated.safetensors" not in shards
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, by_peft(base, adapter), atol=1e-5, rtol=0)


def test_an_exported_adapter_is_a_plain_peft_folder(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert "marft.json" in files(adapter)
    export_adapter(base, adapter, tmp_path / "out")
    assert files(tmp_path / "out") == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == base.name
    torch.testing.assert_close(by_peft(base, tmp_path / "out"), by_peft(base, adapter), atol=0, rtol=0)


# Refusals


def rewritten(
    adapter: Path,
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A copy of an adapter with something changed."""
    folder.mkdir()
    fields = json.loads((adapter / "adapter_config.json").read_text()) | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    matrices = load_file(adapter / "adapter_model.safetensors")
    tensors(matrices)
    save_file(matrices, folder / "adapter_model.safetensors", metadata=metadata)
    return folder


def refused(export: Callable[..., None], model_dir: Path, adapter: Path, out: Path) -> str:
    """The one line with which an export is refused; nothing of it is left."""
    before = files(out) if out.is_dir() else None
    with pytest.raises(TrainError) as caught:
        export(model_dir, adapter, out)
    assert (files(out) if out.is_dir() else None) == before
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("export", [export_adapter, export_merged])
def test_an_adapter_is_exported_for_its_own_base_only(
    export: Callable[..., None], adapter: Path, tmp_path: Path
) -> None:
    other = save_base(tmp_path / "other", seed=1)
    assert "was made for another base model" in refused(export, other, adapter, tmp_path / "out")


@pytest.mark.parametrize("export", [export_adapter, export_merged])
def test_a_folder_in_use_is_left_alone_and_an_empty_one_is_filled(
    export: Callable[..., None], base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "exists already" in refused(export, base, adapter, out)
    assert "exists already" in refused(export, base, adapter, out / "mine.txt")
    (out / "mine.txt").unlink()
    export(base, adapter, out)
    assert files(out) != []


@pytest.mark.parametrize("export", [export_adapter, export_merged])
def test_what_is_not_an_adapter_is_said(export: Callable[..., None], base: Path, adapter: Path, tmp_path: Path) -> None:
    assert "is not a LoRA adapter" in refused(export, base, tmp_path / "none", tmp_path / "out")
    pickled = rewritten(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").write_bytes(b"\x80\x04 pickled")
    assert "is not a LoRA adapter" in refused(export, base, pickled, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"alpha_pattern": {"q_proj": 1}}, "alpha_pattern = {'q_proj': 1}, which is not merged here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which is not merged here"),
        ({"of_the_future": 1}, "of_the_future = 1, which is not merged here"),
    ],
    ids=["dora", "rslora", "alpha-pattern", "changes-the-base", "unknown"],
)
def test_an_adapter_that_does_more_than_add_b_a_is_not_merged(
    config: dict[str, Any], message: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    sha256 = weights_to_sha256(base)
    more = rewritten(adapter, tmp_path / "more", config, metadata={"base_sha256": sha256})
    assert message in refused(export_merged, base, more, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(next(iter(t))), "holds no pair lora_A, lora_B"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), "holds no pair lora_A, lora_B"),
        (
            lambda t: t.update(
                {f"base_model.model.model.layers.9.q_proj.lora_{m}.weight": torch.ones(4, 4) for m in "AB"}
            ),
            "stores no 'model.layers.9.q_proj.weight'",
        ),
        (
            lambda t: t.update(
                {n: torch.ones(4, 7) for n in t if n.endswith("layers.0.self_attn.q_proj.lora_A.weight")}
            ),
            "in another shape than the adapter's",
        ),
    ],
    ids=["half-a-pair", "a-whole-weight", "no-such-layer", "shape"],
)
def test_matrices_that_do_not_fit_the_base_are_not_merged(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    sha256 = weights_to_sha256(base)
    other = rewritten(adapter, tmp_path / "odd", tensors=change, metadata={"base_sha256": sha256})
    assert message in refused(export_merged, base, other, tmp_path / "out")


def test_a_quantised_base_is_not_merged_into(base: Path, adapter: Path, tmp_path: Path) -> None:
    quantised = save_base(tmp_path / "quantised")
    weights = load_file(quantised / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, quantised / "model.safetensors")
    rebased = rewritten(adapter, tmp_path / "rebased", metadata={"base_sha256": weights_to_sha256(quantised)})
    assert "quantised" in refused(export_merged, quantised, rebased, tmp_path / "out")


def test_a_base_whose_templates_would_be_lost_is_not_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    several = save_base(tmp_path / "several")
    (several / "additional_chat_templates").mkdir()
    assert "several chat templates" in refused(export_merged, several, adapter, tmp_path / "out")


# The command


@pytest.fixture
def run(base: Path, tmp_path: Path) -> list[str]:
    """A run folder with versions 0 to 2 of the actor and version 0 of the reasoner, as flags."""
    example = ROOT / "examples/math_duo/bridge.toml"
    config = tmp_path / "bridge.toml"
    config.write_text(example.read_text().replace('path = "smollm2-135m"', f'path = "{base}"'))
    registry = AdapterRegistry(tmp_path / "run" / "adapters", weights_to_sha256(base))
    for node in ("actor", "reasoner"):
        write_zero_adapter(registry.new_folder(node, 0), base, ("q_proj",))
        registry.register(node, 0, None, {})
    for version in (1, 2):
        save_shaken(base, registry.new_folder("actor", version), seed=version)
        registry.register("actor", version, version - 1, {})
    return ["--config", str(config), "--run", str(tmp_path / "run")]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["export", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("marft-bridge: ")
    assert error.count("\n") == 1
    return error


def test_the_newest_version_is_exported_unless_one_is_named(
    run: list[str], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["export", "actor", str(tmp_path / "newest"), *run]) == 0
    assert "exported actor@2 as a peft adapter" in capsys.readouterr().out
    assert cli.run(["export", "actor", str(tmp_path / "first"), "--version", "1", "--merged", *run]) == 0
    assert "exported actor@1 merged into its base model" in capsys.readouterr().out
    adapters = tmp_path / "run/adapters/actor"
    assert files(tmp_path / "newest") == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    weights = "adapter_model.safetensors"
    assert (tmp_path / "newest" / weights).read_bytes() == (adapters / "2" / weights).read_bytes()
    first = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "first"))
    torch.testing.assert_close(first, by_peft(base, adapters / "1"), atol=1e-5, rtol=0)


def promotion_of_actor(folder: Path, base: Path, **changes: Any) -> Manifest:
    """Actor 1 as it is in the run folder; `changes` are fields of the manifest."""
    sha256 = hashlib.sha256((folder / "run/adapters/actor/1/adapter_model.safetensors").read_bytes()).hexdigest()
    content = {
        "number": 1,
        "previous_sha256": None,
        "candidate": "after",
        "base": "before",
        "graph": "g",
        "model": "m",
        "base_sha256": weights_to_sha256(base),
        "tool_surface": {},
        "tool_surface_differs": False,
        "verdict": "better",
        "gate": "correct>0",
        "findings": (),
        "report_sha256": "0" * 64,
        "safety": None,
        "signed_by": "Jane Doe",
        "signed_at": datetime(2026, 11, 22, tzinfo=UTC),
        "adapters": {"actor": PromotedAdapter(version=1, sha256=sha256)},
    }
    return Manifest.model_validate(content | changes)


def test_the_promoted_version_is_exported_by_that_name(
    run: list[str], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--version", "promoted", *run]
    assert "no version of 'actor' was promoted" in said(["actor", str(tmp_path / "out"), *flags], capsys)
    write_manifest(tmp_path / "run", promotion_of_actor(tmp_path, base))
    assert cli.run(["export", "actor", str(tmp_path / "out"), *flags]) == 0
    assert "exported actor@1" in capsys.readouterr().out
    assert "no version of 'reasoner' was promoted" in said(["reasoner", str(tmp_path / "other"), *flags], capsys)
    assert "nor one of: best, newest, promoted" in said(
        ["actor", str(tmp_path / "x"), "--version", "new", *run], capsys
    )


def test_what_was_not_signed_off_is_not_exported(
    run: list[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "a key of the test suite"
    monkeypatch.setenv("PROMOTION_KEY", key)
    config = Path(run[1])
    config.write_text(config.read_text() + '\n[promote]\nkey_env = "PROMOTION_KEY"\n')
    arguments = ["actor", str(tmp_path / "out"), "--version", "promoted", *run]

    def promoted(manifest: Manifest) -> str:
        shutil.rmtree(tmp_path / "run/promoted", ignore_errors=True)
        write_manifest(tmp_path / "run", manifest)
        return said(arguments, capsys)

    whole = promotion_of_actor(tmp_path, base)
    assert "1.json is not signed" in promoted(whole)
    other_key = whole.signed(b"a key of somebody else")
    assert "1.json was changed, or signed with another key" in promoted(other_key)
    other_weights = promotion_of_actor(tmp_path, base, adapters={"actor": PromotedAdapter(version=1, sha256="a" * 64)})
    assert "adapter v1 of node 'actor' is not the one that promotion 1 signed off" in promoted(
        other_weights.signed(key.encode())
    )
    other_base = promotion_of_actor(tmp_path, base, base_sha256="a" * 64)
    assert "is not the one that promotion 1 signed off" in promoted(other_base.signed(key.encode()))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_said_in_one_line(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert "'critic' is not among graph.nodes: reasoner, actor" in said(["critic", out, *run], capsys)
    assert "'reasoner' has no trained adapter" in said(["reasoner", out, *run], capsys)
    assert "version 0 of 'actor' changes nothing" in said(["actor", out, "--version", "0", *run], capsys)
    assert "no adapter v7; published: v0, v1, v2" in said(["actor", out, "--version", "7", *run], capsys)
    assert "there is no run folder none" in said(["actor", out, *run[:2], "--run", "none"], capsys)
    assert not Path(out).exists()


def test_weights_that_changed_after_registration_are_not_exported(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/adapters/actor/2/adapter_model.safetensors").write_bytes(b"other")
    error = said(["actor", str(tmp_path / "out"), *run], capsys)
    assert "adapter_model.safetensors' is not what was registered" in error


def test_a_scale_that_changed_after_registration_is_not_exported(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run/adapters/actor/2/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 600}))
    for flags in ((), ("--merged",)):
        error = said(["actor", str(tmp_path / "out"), *flags, *run], capsys)
        assert "adapter_config.json' is not what was registered" in error
    assert not (tmp_path / "out").exists()


def test_help_ends_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", "--help"]) == 0
    example = shlex.split(" ".join(capsys.readouterr().out.split()).split("Example: ")[1])
    assert example[:2] == ["marft-bridge", "export"]
    assert cli.run([*example[1:], "--help"]) == 0
