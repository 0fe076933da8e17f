#!/usr/bin/env python3
"""Writes lora/llama_dora, lora/llama_pissa and quantized/*: tiny models, and what PyTorch, transformers, PEFT and
bitsandbytes compute from them on a CPU in f32.

    python adapters.py .

- `lora/NAME` has `base/`, `adapter/` as PEFT saved it, and `expected.safetensors`: logits, losses before and after three
  AdamW steps of the adapter, its first gradients and last values, and the merged weights.
- `quantized/plain` is a folder in bf16, and `quantized/NAME` the same folder as bitsandbytes quantizes it, with an adapter
  and the same expectations. They are those of a model with the weights that bitsandbytes dequantizes, in f32.
- `quantized/llama_fp8` and `quantized/gpt_oss_mxfp4` have FP8 weights in blocks, and MXFP4 experts. Their expectations are
  those of the weights dequantized to bf16, in f32.
"""

import json, math, os, shutil, sys, warnings, zlib
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

STEPS = 3
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
LLAMA = dict(model_type="llama", vocab_size=80, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
             tie_word_embeddings=False)
GPT_OSS = dict(model_type="gpt_oss", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
               num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
               sliding_window=6, max_position_embeddings=64, eos_token_id=2, pad_token_id=None)
TARGETS = ["q_proj", "v_proj"]


def noise(shape, name):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def write_base(config, path, dtype):
    shutil.rmtree(path, ignore_errors=True)
    config = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 1.0 if "norm" in name or "embed" in name else 0.2
            p.copy_(scale * noise(p.shape, name) + (1.0 if "norm" in name else 0.0))
    model.to(dtype).save_pretrained(path)


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **options).eval()


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def write_adapter(model, path, name, **options):
    """Saves an adapter whose values are those of PEFT with noise, so that it changes the model."""
    shutil.rmtree(path, ignore_errors=True)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS, bias="none", **options)
    torch.manual_seed(0)
    peft = get_peft_model(model, lora)
    with torch.no_grad():
        for parameter, p in peft.named_parameters():
            if p.requires_grad:
                p.add_(0.1 * noise(p.shape, name + parameter))
    peft.peft_config["default"].base_model_name_or_path = "../base"
    peft.save_pretrained(path)
    (path / "README.md").unlink(missing_ok=True)
    config = json.loads((path / "adapter_config.json").read_text())
    config["target_modules"].sort()
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def expect(peft, ids, path, merged, about, noise):
    peft = peft.eval()
    name_of = lambda n: n.replace(".default.weight", "" if "magnitude" in n else ".weight")
    params = {name_of(n): p for n, p in peft.named_parameters() if p.requires_grad}
    assert set(params) == set(load_file(path / "adapter/adapter_model.safetensors")), sorted(params)
    groups = [dict(params=[p for p in params.values() if p.dim() > 1], weight_decay=0.1),
              dict(params=[p for p in params.values() if p.dim() == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], foreach=False, **ADAMW)
    losses, tensors = [], {f"merged.{n}": t for n, t in merged.items()}
    for step in range(STEPS + 1):
        logits = peft(ids).logits
        loss = loss_of(logits, ids)
        losses.append(loss.item())
        if step == 0:
            tensors["logits"] = logits.detach()
        if step == STEPS:
            break
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            tensors |= {f"grad.{n}": p.grad.clone() for n, p in params.items()}
        optimizer.step()
    tensors |= {f"param_after.{n}": p.detach() for n, p in params.items()}
    tensors |= dict(input_ids=ids, losses=torch.tensor(losses))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "expected.safetensors")
    (path / "expected.json").write_text(json.dumps(dict(about=about, losses=losses, noise_f32_against_f64=noise), indent=1) + "\n")
    print(path, losses)


def lora(root, name, about, **options):
    out = root / "lora" / name
    write_base(LLAMA, out / "base", torch.float32)
    write_adapter(load(out / "base"), out / "adapter", name, **options)
    fresh = lambda trainable: PeftModel.from_pretrained(load(out / "base"), out / "adapter", is_trainable=trainable)
    state = fresh(False).merge_and_unload().state_dict()
    merged = {n: t for n, t in state.items() if any(n.endswith(f"{target}.weight") for target in TARGETS)}
    exact = fresh(False)
    noise = {"merged": 0.0}
    if options.get("init_lora_weights") == "pissa":
        noise["merged"] = use_exact_components(exact, load(out / "base"))
    with torch.no_grad():
        logits, expected = (model.eval()(ids_of(name)).logits for model in (exact, fresh(False)))
    noise["logits"] = ((logits - expected).abs().max() / expected.abs().max()).item()
    expect(fresh(True), ids_of(name), out, merged, about, noise)


def use_exact_components(peft, base):
    """Subtracts principal components in f64 from the weights, where PEFT computes them in f32. Returns the largest change."""
    worst, weights = 0.0, base.state_dict()
    for name, module in peft.named_modules():
        if hasattr(module, "lora_A"):
            whole = weights[name.removeprefix("base_model.model.") + ".weight"].double()
            u, s, v = torch.linalg.svd(whole, full_matrices=False)
            rest = (whole - u[:, :4] @ torch.diag(s[:4]) @ v[:4]).float()
            worst = max(worst, ((module.base_layer.weight - rest).abs().max() / whole.abs().max()).item())
            module.base_layer.weight.data = rest
    return worst


def ids_of(name, count=16):
    return torch.randint(80, (2, count), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def dequantized(folder):
    """The weights of a folder that bitsandbytes quantized, in the type to which bitsandbytes dequantizes them."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in tensors.items():
        if f"{name}.quant_map" in tensors:
            state = {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name + ".")}
            state = bnb.QuantState.from_dict(state, device=torch.device("cpu"))
            weights[name] = bnb.dequantize_4bit(tensor, state)
        elif name.removesuffix("weight") + "SCB" in tensors:
            weights[name] = bnb.int8_vectorwise_dequant(tensor, tensors[name.removesuffix("weight") + "SCB"])
        elif name.endswith(("weight", "bias")):
            weights[name] = tensor
    return {name: weight.float() for name, weight in weights.items()}


def quantize(root, name, about, **options):
    out = root / "quantized" / name
    shutil.rmtree(out, ignore_errors=True)
    plain = root / "quantized/plain"
    how = BitsAndBytesConfig(llm_int8_skip_modules=None, **options)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=how).save_pretrained(out / "base")
    (out / "base/generation_config.json").unlink(missing_ok=True)

    def model():
        model = load(plain)
        missing, extra = model.load_state_dict(dequantized(out / "base"), strict=False)
        assert not extra and not missing, (missing, extra)
        return model

    write_adapter(model(), out / "adapter", name)
    expect(PeftModel.from_pretrained(model(), out / "adapter", is_trainable=True), ids_of(name), out, {}, about, {})


def expect_weights(out, config, weights, name, about):
    """What a model with these weights computes."""
    config = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32,
                                             attn_implementation="eager").eval()
    model.load_state_dict({n: t.float() for n, t in weights.items()})
    ids = ids_of(name)
    with torch.no_grad():
        logits = model(ids).logits
    save_file(dict(input_ids=ids, logits=logits, losses=loss_of(logits, ids).reshape(1)), out / "expected.safetensors")
    (out / "expected.json").write_text(json.dumps(dict(about=about, noise_f32_against_f64={}), indent=1) + "\n")
    print(out, loss_of(logits, ids).item())


def patch_config(folder, quantization):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def fp8(root):
    out, block = root / "quantized/llama_fp8", 16
    write_base(LLAMA, out / "base", torch.bfloat16)
    file = out / "base/model.safetensors"
    stored, weights = {}, load_file(file)
    for name, weight in list(weights.items()):
        if "_proj" not in name:
            stored[name] = weight
            continue
        rows, columns = weight.shape
        grid = F.pad(weight.float(), (0, -columns % block, 0, -rows % block))
        blocks = grid.view(grid.shape[0] // block, block, grid.shape[1] // block, block).permute(0, 2, 1, 3)
        scales = blocks.abs().amax((2, 3)) / 448
        whole = lambda blocks: blocks.permute(0, 2, 1, 3).reshape(grid.shape)[:rows, :columns]
        codes = (blocks / scales[..., None, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = whole(codes).contiguous(), scales
        weights[name] = whole(codes.float() * scales[..., None, None]).bfloat16()
    save_file(stored, file, metadata={"format": "pt"})
    patch_config(out / "base", dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[block, block]))
    expect_weights(out, LLAMA, weights, "fp8", "FP8 weights with a scale per block of 16 × 16")


def mxfp4(root):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    out = root / "quantized/gpt_oss_mxfp4"
    write_base(GPT_OSS, out / "base", torch.bfloat16)
    file = out / "base/model.safetensors"
    stored, weights = {}, load_file(file)
    for name, weight in list(weights.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draw)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        weights[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    patch_config(out / "base", dict(quant_method="mxfp4", modules_to_not_convert=skipped))
    expect_weights(out, GPT_OSS, weights, "mxfp4", "MXFP4 weights of experts")


def main():
    root = Path(sys.argv[1])
    lora(root, "llama_dora", "DoRA of rank 4, alpha 8, on q_proj and v_proj", use_dora=True)
    lora(root, "llama_pissa", "PiSSA of rank 4, alpha 8, on q_proj and v_proj", init_lora_weights="pissa")
    write_base(LLAMA, root / "quantized/plain", torch.bfloat16)
    (root / "quantized/plain/generation_config.json").unlink(missing_ok=True)
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    quantize(root, "llama_nf4", "nf4 with double quantization", bnb_4bit_use_double_quant=True, **nf4)
    quantize(root, "llama_nf4_single", "nf4 with f32 scales", **nf4)
    quantize(root, "llama_int8", "int8", load_in_8bit=True)
    fp8(root)
    mxfp4(root)


main()
