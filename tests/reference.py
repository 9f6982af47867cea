"One block of the drafter by transformers' own rope and a loop over heads, written from the definitions alone."
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb


def one_block(w, cfg, feats_SF, pos_S, h_BD, pos_B):
    "[B, D] in float64 after the context `feats_SF`; `w`: named parameters in float64."
    def norm(x, name):
        return w[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps)
    rope = Qwen3RotaryEmbedding(Qwen3Config(head_dim=cfg.head_dim, hidden_size=cfg.hidden_size, num_attention_heads=cfg.num_attention_heads,
                                            max_position_embeddings=cfg.max_position_embeddings, rope_parameters=dict(cfg.rope_parameters)))
    cos, sin = rope(torch.zeros(1, dtype=torch.float64), torch.tensor([*pos_S, *pos_B])[None])
    S, E, H, K = len(pos_S), cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads
    ctx, h = norm(feats_SF @ w["fc.weight"].T, "hidden_norm.weight"), h_BD
    for i in range(cfg.num_hidden_layers):
        p = f"layers.{i}."
        x = norm(h, p + "input_layernorm.weight")
        kv, split = torch.cat([ctx, x]), lambda t, n: t.view(len(t), n, E).transpose(0, 1)[None]
        q = norm(split(x @ w[p + "self_attn.q_proj.weight"].T, H), p + "self_attn.q_norm.weight")
        k = norm(split(kv @ w[p + "self_attn.k_proj.weight"].T, K), p + "self_attn.k_norm.weight")
        v = split(kv @ w[p + "self_attn.v_proj.weight"].T, K)
        q, k = apply_rotary_pos_emb(q, q, cos[:, S:], sin[:, S:])[0], apply_rotary_pos_emb(k, k, cos, sin)[0]
        y = torch.cat([(q[0, j] @ k[0, j * K // H].T * E**-0.5).softmax(-1) @ v[0, j * K // H] for j in range(H)], -1)
        h = h + y @ w[p + "self_attn.o_proj.weight"].T
        x = norm(h, p + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(x @ w[p + "mlp.gate_proj.weight"].T)
        h = h + (gate * (x @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return norm(h, "norm.weight")
