"""The training scripts: same function as transformers, exact second drafts, codec, tokenizer, texts."""

import ast
import importlib.util
import random
import sys
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"TRAINING SCRIPTS NOT TESTED: {' and '.join(MISSING)} missing; pip install '.[oracle]'",
    ),
]
SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_the_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def network():
    import torch

    from train.model import SHAPES, Network, text_config

    torch.manual_seed(0)
    net = Network(text_config(SHAPES["tiny"]))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for gate in net.routers():
            gate.e_score_correction_bias.normal_(0, 0.1)
    return net


def _ids(rows, length):
    import torch

    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


def test_forward_is_transformers_forward(network, monkeypatch):
    import torch

    from train.forward import Forward, Mode
    from train.golden import _stable_topk

    ids = _ids(2, 64)
    with torch.no_grad():
        ours = Forward(network, torch.float32)(ids, Mode(stable=True)).hidden
        monkeypatch.setattr(torch, "topk", _stable_topk)
        monkeypatch.setattr(torch.Tensor, "topk", _stable_topk)
        theirs = network.trunk(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    assert torch.isfinite(ours).all()
    assert not ((ours - theirs).abs().max() > 1e-4)


@pytest.mark.parametrize("row", [0, 1, 2, 3, 17, 18, 19, 30, 31, 45, 46, 47, 60])
def test_second_draft_is_a_draft_step_on_its_own_output(network, row):
    import torch

    from train.forward import Forward, Mode, Result

    forward, ids = Forward(network, torch.float32), _ids(2, 67)
    mode = Mode(stable=True, draft=True)

    def result():
        return Result(None, None, None, torch.zeros(()))

    with torch.no_grad():
        hidden = forward(ids[:, :65], Mode(stable=True)).hidden
        first, past = forward.draft_step(ids[:, 1:65], hidden, mode, result())
        second = forward.draft_second(ids[:, 2:66], first, past, mode, result())
        fed_back = torch.cat((hidden[:, : row + 1], first[:, row : row + 1]), 1)
        whole, _ = forward.draft_step(ids[:, 1 : row + 3], fed_back, mode, result())
    assert not ((second[:, row] - whole[:, -1]).abs().max() > 1e-5)


def test_every_weight_gets_a_gradient(network):
    import torch

    from train.forward import Forward, Mode

    network.zero_grad()
    with torch.enable_grad():  # the live oracle, in the same process, turns gradients off
        mode = Mode(index_loss=True, quantised=True, draft=True)
        result = Forward(network, torch.float32)(_ids(2, 67), mode)
        (result.loss + result.index_loss + sum(result.draft_losses)).backward()
    without = [n for n, p in network.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert without == []


def test_nvfp4_takes_the_nearest_value_and_packs_the_even_column_low():
    import torch

    from train.nvfp4 import E2M1, dequantise, quantise, round_trip

    torch.manual_seed(2)
    weight = torch.randn(3, 8, 64) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    weight[1, 2] = 0
    packed, scale, overall = quantise(weight)
    back = dequantise(packed, scale, overall)
    assert torch.equal(back, round_trip(weight))
    step = (scale.float() * overall[:, None, None]).repeat_interleave(16, -1)
    grid = torch.tensor([sign * value for value in E2M1 for sign in (1, -1)])
    best = (step[..., None] * grid - weight[..., None]).abs().amin(-1)
    assert not (((back - weight).abs() - best).max() > 1e-6 * weight.abs().max())
    first = packed[0, 0, 0].item()
    table = [*E2M1, *(-value for value in E2M1)]
    assert table[first & 15] * step[0, 0, 0] == pytest.approx(back[0, 0, 0].item())
    assert table[first >> 4] * step[0, 0, 1] == pytest.approx(back[0, 0, 1].item())
    zero = quantise(torch.zeros(1, 2, 16))
    assert not dequantise(*zero).any()


def test_a_fuel_reads_back_as_the_quantised_network(network, tmp_path):
    import torch

    from train.fuel import load_weights, quantise_experts, read_fuel, rounded, save_weights, write_fuel
    from train.tokens import train_tokenizer

    save_weights(rounded(network), tmp_path / "weights")
    tokenizer = train_tokenizer(iter(["def f(x):\n    return x\n"] * 10), 300)
    write_fuel(tmp_path / "weights", tokenizer, "tiny", tmp_path / "fuel")
    stored = read_fuel(tmp_path / "fuel", "tiny").state_dict()
    expected = quantise_experts(load_weights(tmp_path / "weights", "tiny")).state_dict()
    assert [name for name in expected if not torch.equal(stored[name], expected[name])] == []


def test_splitting_line_ends_keeps_the_text(tmp_path):
    import numpy as np
    import torch

    from train.corpus import GROUPS
    from train.tokens import Batches, encode, train_tokenizer

    text = "def f(x):\n    return g(x),\n\nclass A:\n    b = {}\n"
    tokenizer = train_tokenizer(iter([text] * 50), 320)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for group in GROUPS:
        np.save(tmp_path / f"train-{group}.npy", encode(tokenizer, [text] * 40))
    whole = tokenizer.decode(encode(tokenizer, [text] * 3).tolist(), skip_special_tokens=False)
    plain, cut = (Batches(tmp_path, torch.device("cpu"), 3, split=s).draw(32, 24) for s in (0.0, 1.0))
    assert plain.shape == cut.shape
    assert (cut != plain).any()
    for row in cut.tolist():
        assert tokenizer.decode(row, skip_special_tokens=False) in whole


def test_generated_functions_parse_and_facts_name_their_capital():
    from train.facts import COUNTRIES, fact_documents
    from train.functions import function_documents

    for document in function_documents(5, 400):
        code = document.split("```python\n")[1].split("```")[0] if "```" in document else document
        ast.parse(code)
    facts = "\n".join(fact_documents(5, 20_000))
    rows = [line.split("|") for line in COUNTRIES.strip().splitlines()]
    assert all(len(row) == 5 for row in rows)
    for country, capital, *_ in random.Random(0).sample(rows, 20):
        assert f"The capital of {country} is {capital}." in facts
