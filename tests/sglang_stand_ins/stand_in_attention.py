"""An attention backend for CPUs that can verify drafts: torch_native, and a loop over requests for verification."""

import os

NAME = "torch_verify"


def register():
    """Entry point of SGLang's plugins: offers the backend under `--attention-backend torch_verify`."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from torch.nn.functional import scaled_dot_product_attention

    class VerifyingBackend(TorchNativeAttnBackend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
            if not forward_batch.forward_mode.is_target_verify():
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            pool, rows = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
            if save_kv_cache:
                pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            width = forward_batch.spec_info.draft_token_num
            masks = forward_batch.spec_info.custom_mask.view(-1, width, width).bool()
            queries = q.view(forward_batch.batch_size, width, layer.tp_q_head_num, layer.qk_head_dim)
            outputs = []
            for row, length in enumerate(forward_batch.seq_lens.tolist()):
                slots = rows[forward_batch.req_pool_indices[row], : length + width].long()
                mask = torch.cat([torch.ones(width, length, dtype=torch.bool), masks[row]], dim=1)
                output = scaled_dot_product_attention(
                    queries[row].transpose(0, 1)[None],
                    keys[slots].transpose(0, 1)[None].to(q.dtype),
                    values[slots].transpose(0, 1)[None].to(q.dtype),
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )
                outputs.append(output[0].transpose(0, 1).reshape(width, -1))
            return torch.cat(outputs)

    register_attention_backend(NAME)(lambda runner: VerifyingBackend(runner))
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
