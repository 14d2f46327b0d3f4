"""Small models of transformers of every kind, and their errors where ranks share sequences, against one rank."""

import inspect
import warnings

import torch
import torch.distributed as dist

VOCABULARY, LENGTH = 96, 29
BATCHES = ("plain", "padded", "padded at the start", "documents", "documents of a part")
# The sizes that configurations name in one way or another; 6 heads are shared by 2 and by 3 ranks.
SHAPE = {
    **{"vocab_size": VOCABULARY, "hidden_size": 48, "d_model": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 128},
    **{"sliding_window": None, "layer_types": ["full_attention"] * 2, "pad_token_id": 1, "bos_token_id": 2},
    **{"eos_token_id": 3, "num_labels": 3, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6},
    **{"embedding_size": 48, "word_embed_proj_dim": 48, "type_vocab_size": 2, "use_sliding_window": False},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "moe_topk": 2},
    **{"num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
}
RANDOM = {"PhimoeForCausalLM", "PhimoeForSequenceClassification"}  # in training its routers draw
OPTIONAL = (
    [],
    ["layer_types"],
    ["head_dim"],
    ["layer_types", "head_dim"],
    ["layer_types", "head_dim", "sliding_window"],
)


def model_class(name):
    """Return a class of models by its name."""
    import transformers

    return getattr(transformers, name)


def built(name, dtype=torch.float64, **changes):
    """Return a small random model of the class `name`, without dropout."""
    kind = model_class(name)
    config = _configuration(kind, {**SHAPE, "is_decoder": "CausalLM" in name, **changes})
    for key, value in list(vars(config).items()):
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    if name.endswith("QuestionAnswering"):
        config.num_labels = 2
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    config._experts_implementation = "eager"  # others take no float64
    torch.manual_seed(3)
    model = kind(config).to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for weight in model.parameters():  # biases and norms begin as zeros and ones
        weight.data += 0.05 * torch.randn_like(weight)
    return model.train()


def _configuration(kind, values):
    """Return a configuration; some refuse what others need."""
    for without in OPTIONAL:
        try:
            return kind.config_class(**{name: value for name, value in values.items() if name not in without})
        except Exception as error:  # noqa: BLE001 - configurations check themselves in many ways
            reason = error
    raise reason


def runs_alone(name):
    """Tell whether a small model of the class can be made here, has full attention, and runs on one rank."""
    kind = model_class(name)
    try:
        with torch.device("meta"):
            model = kind(_configuration(kind, SHAPE))
        if sum(weight.numel() for weight in model.parameters()) > 8_000_000 or not model.supports_context_parallel:
            return False
        _run(built(name), {"input_ids": torch.full((1, 4), 5)})
    except Exception:  # noqa: BLE001 - of sizes that do not fit, packages that are missing, and the like
        return False
    return True


def batches_of(model, ranks):
    """Return whole batches by name."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(4, VOCABULARY, (2, LENGTH + 1), generator=generator)
    labels = ids % 3 if "TokenClassification" in type(model).__name__ else ids.clone()
    labels[torch.rand(labels.shape, generator=generator) > 0.6] = -100
    found = {}
    for name in BATCHES:
        length = LENGTH + (name == "documents of a part")  # 30 tokens are divided by 2 and by 3 ranks
        batch = {"input_ids": ids[:, :length].clone(), "labels": labels[:, :length].clone()}
        if name.startswith("padded"):
            mask = torch.ones_like(batch["input_ids"])
            mask[0, :5] = name == "padded"
            mask[0, -5:] = name != "padded"
            batch["attention_mask"] = mask
            batch["input_ids"][mask == 0], batch["labels"][mask == 0] = 1, -100
        if name.startswith("documents"):
            lengths = (12, 17) if name == "documents" else (30 // ranks,) * ranks
            batch["position_ids"] = torch.cat([torch.arange(each) for each in lengths]).expand(2, -1)
        found[name] = batch
    return found


def errors_of(name, group, exchange=None):
    """Return the largest error of loss (or outputs) and gradients of each batch, or the sentence that refuses it."""
    from ascend_parallel.patches.transformers import context_parallel

    truth, model = built(name), built(name)
    context = context_parallel(model, group, exchange=exchange)
    labelled = "labels" not in context.proof.refused
    found = {}
    for case, batch in batches_of(model, group.size()).items():
        if not labelled:
            del batch["labels"]
        try:
            parts = context.cut(**batch)
        except ValueError as error:
            found[case] = str(error)
            continue
        expected, shared = (_run(each, given) for each, given in ((truth, batch), (model, parts)))
        if labelled:
            whole, total = expected.loss, shared.loss.detach().clone()
            shared.loss.backward()
        else:
            whole, total, share = _weighted(expected, shared, context, batch)
            share.backward()
        whole.backward()
        dist.all_reduce(total, group=group)
        found[case] = max(
            float(abs(total - whole.detach()) / abs(whole.detach())), _gradient_error(truth, model, group)
        )
    return found


def _run(model, batch):
    model.zero_grad()
    kwargs = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    with warnings.catch_warnings(action="ignore"):
        return model(**batch, **kwargs)


def _weighted(expected, shared, context, batch):
    """Return sums of outputs by drawn weights: of one rank, of all ranks (to be added), of this rank with its graph."""
    name = next(each for each in ("logits", "last_hidden_state", "start_logits") if each in expected)
    x, y, length = expected[name], shared[name], batch["input_ids"].shape[1]
    own = context.own_places(y.shape[1] * context.group.size())
    inside = own < length
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    if "attention_mask" in batch:
        weights[batch["attention_mask"] == 0] = 0
    whole, share = (x * weights).sum(), (y[:, inside] * weights[:, own[inside]]).sum()
    return whole, share.detach().clone(), share


def _gradient_error(truth, model, group):
    """Return the largest error of a gradient that is summed over the ranks, by the largest gradient."""
    scale = max(float(weight.grad.abs().max()) for weight in truth.parameters() if weight.grad is not None)
    worst = 0.0
    for expected, weight in zip(truth.parameters(), model.parameters(), strict=True):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(gradient, group=group)
        difference = gradient if expected.grad is None else gradient - expected.grad
        worst = max(worst, float(difference.abs().max()) / scale)
    return worst
