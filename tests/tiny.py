"""Tiny random causal language models, one a family, and a byte tokenizer: fixtures shared by all tests."""
import torch

FAMILIES = ["llama", "qwen3", "qwen2", "gemma2", "gemma3", "qwen3_moe", "mixtral", "mistral", "gpt_neox"]
EXTRA = ["gemma", "granite", "cohere", "phi", "gpt2"]
TIED = {"qwen3", "gemma2", "gemma3", "gemma", "granite", "cohere", "gpt2"}  # the others have a head of their own
PADDED = {"qwen2": 272, "gemma3": 288}  # more embedding rows than the tokenizer has ids
SLIDING = {"gemma2": 8, "gemma3": 8, "mistral": 8}
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"]

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_chars():
    "The printable character that byte-level BPE uses for each of the 256 bytes."
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars, extra = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in chars:
            chars[b], extra = chr(256 + extra), extra + 1
    return [chars[b] for b in range(256)]


def byte_tokenizer(mask=True, template=TEMPLATE):
    """Token id = byte; then <|im_start|> 256, <|im_end|> 257 (eos), <|pad|> 258 and, if asked, <|mask|> 259."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(_byte_chars())}, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    names = SPECIALS if mask else SPECIALS[:3]
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in names])
    kw = {"mask_token": "<|mask|>"} if mask else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False, **kw)
    fast.chat_template = template
    return fast


def tiny_config(family="qwen3", **changes):
    "transformers config of the family: hidden 64, 6 layers, 4 heads, 2 kv heads, head_dim 16, 260 rows (or padded)."
    import transformers as tf

    base = dict(vocab_size=PADDED.get(family, 260), hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, intermediate_size=128, max_position_embeddings=512,
                initializer_range=0.1, tie_word_embeddings=family in TIED, bos_token_id=None, eos_token_id=257,
                pad_token_id=258)
    rope = lambda theta, **kw: dict(rope_type="default", rope_theta=theta, **kw)  # noqa: E731
    kinds = ["sliding_attention", "full_attention"] * 3
    own = {
        "llama": (tf.LlamaConfig, dict(rope_parameters=rope(500_000.0))),
        "qwen3": (tf.Qwen3Config, dict(rope_parameters=rope(1_000_000.0))),
        "qwen2": (tf.Qwen2Config, dict(rope_parameters=rope(1_000_000.0), head_dim=None)),
        "gemma": (tf.GemmaConfig, {}),
        "gemma2": (tf.Gemma2Config, dict(sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16,
                                         final_logit_softcapping=3.0, attn_logit_softcapping=5.0)),
        "gemma3": (tf.Gemma3TextConfig, dict(
            sliding_window=8, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
            query_pre_attn_scalar=16,
            rope_parameters={"sliding_attention": rope(10_000.0), "full_attention": rope(1_000_000.0)})),
        "qwen3_moe": (tf.Qwen3MoeConfig, dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                              rope_parameters=rope(1_000_000.0))),
        "mixtral": (tf.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
                                           rope_parameters=rope(1_000_000.0))),
        "mistral": (tf.MistralConfig, dict(sliding_window=8, rope_parameters=rope(10_000.0))),
        "gpt_neox": (tf.GPTNeoXConfig, dict(rope_parameters=rope(10_000.0, partial_rotary_factor=0.25))),
        "phi": (tf.PhiConfig, dict(rope_parameters=rope(10_000.0, partial_rotary_factor=0.5))),
        "granite": (tf.GraniteConfig, dict(embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.5,
                                           attention_multiplier=0.25)),
        "cohere": (tf.CohereConfig, dict(logit_scale=0.25)),
        "gpt2": (tf.GPT2Config, dict(n_embd=64, n_layer=6, n_head=4, n_positions=512)),
    }
    cls, extra = own[family]
    kw = {**base, **extra, **changes}
    if family == "gpt2":
        gone = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                "intermediate_size", "max_position_embeddings")
        kw = {k: v for k, v in kw.items() if k not in gone}
    if family in ("gpt_neox", "phi", "qwen2", "cohere", "granite"):
        kw.pop("head_dim", None)
    if family == "gpt_neox":
        kw.pop("num_key_value_heads", None)
    return cls(**kw)


def tiny_model(family="qwen3", seed=0, **changes):
    "Random float32 model in eval mode; norm weights and biases are moved off neutral so that mistakes show."
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(0.1 * torch.randn_like(p))
    return model.eval().requires_grad_(False)


def tiny_target(family="qwen3", seed=0, mask=True, **changes):
    "dflash_nb Target over `tiny_model` with the byte tokenizer (mask id 259 unless mask=False)."
    from dflash_nb.target import Target

    return Target.from_model(tiny_model(family, seed, **changes), byte_tokenizer(mask), name=f"tiny-{family}")
