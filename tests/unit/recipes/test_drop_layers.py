"""Students made by dropping layers."""

import torch
from drop_layers import LayerSearch
from transformers import Qwen2Config, Qwen2ForCausalLM


def small_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.5,
        )
    ).eval()


def test_dropping_a_layer_that_does_nothing_has_no_kl_and_leaves_the_logits_unchanged() -> None:
    model = small_model()
    idle = model.model.layers[2]
    torch.nn.init.zeros_(idle.self_attn.o_proj.weight)
    torch.nn.init.zeros_(idle.mlp.down_proj.weight)
    tokens = torch.randint(0, 32, (3, 12), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[0, :2] = False
    search = LayerSearch(model, tokens, real, prompt=4)
    kl_without = {layer: search.kl([one for one in range(4) if one != layer]) for layer in range(4)}
    assert min(kl_without, key=lambda layer: kl_without[layer]) == 2
    assert abs(kl_without[2]) < 1e-6 and all(kl > 1e-3 for layer, kl in kl_without.items() if layer != 2)
    with torch.no_grad():
        whole = small_model()
        whole.load_state_dict({**whole.state_dict(), **_zeroed(whole)})
        cut = search.keep([0, 1, 3])
        assert cut.config.num_hidden_layers == 3
        assert torch.allclose(cut(tokens).logits, whole(tokens).logits, atol=1e-5)


def _zeroed(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    names = ("model.layers.2.self_attn.o_proj.weight", "model.layers.2.mlp.down_proj.weight")
    return {name: torch.zeros_like(model.state_dict()[name]) for name in names}


def test_the_kl_is_computed_over_answer_tokens_only() -> None:
    model = small_model()
    tokens = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, 8:] = False
    search = LayerSearch(model, tokens, real, prompt=5)
    with torch.no_grad():
        teacher = torch.log_softmax(small_model()(tokens).logits, -1)
        model.model.layers = torch.nn.ModuleList(search.layers[1:])
        cut = torch.log_softmax(model(tokens, use_cache=False).logits, -1)
    per_token = (teacher.exp() * (teacher - cut)).sum(-1)
    # A token at position t is predicted at t − 1: positions 4 … 8 of row 0, 4 … 6 of row 1.
    expected = torch.cat([per_token[0, 4:9], per_token[1, 4:7]]).mean()
    assert abs(search.kl([1, 2, 3]) - float(expected)) < 1e-5
