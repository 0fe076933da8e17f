#!/usr/bin/env python3
"""Adds `kto` and `kto_lora` to preference/llama.json: 20 steps of TRL's KTOTrainer on a CPU in f32.

    python kto.py .

The answers are those of the file's pairs: the chosen answer of the pairs with an even index, which are desirable, and the
rejected answer of the others, which are undesirable. Batches have 4 answers, in order. TRL pairs the prompt of each answer
with the previous answer of its batch, and that of the first one with the last.
"""

import json, os, re, sys, tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer

torch.set_num_threads(1)
STEPS, BATCH = 20, 4
# As in the test: rejected answers weigh 1.5.
WEIGHTS = dict(desirable_weight=1.0, undesirable_weight=1.5)


def text(ids):
    return "".join(f" {word(i)}" for i in ids)


def word(i):
    """No special token is the beginning of another word, as special tokens are found within words."""
    return {0: "<pad>", 2: "</s>"}.get(i, f"t{i}")


def steps(root, pairs, is_lora):
    folder = root / "lora/llama_qv"
    vocabulary = {word(i): i for i in range(300)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    answers = [dict(prompt=text(p), completion=text([c, r][i % 2]), label=i % 2 == 0) for i, (p, c, r) in enumerate(pairs)]
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="eager")
    if is_lora:
        lora = LoraConfig.from_pretrained(folder / "adapter")
        lora.inference_mode = False
        model = get_peft_model(model, lora)
        stored = load_file(folder / "adapter/adapter_model.safetensors")
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.data.copy_(stored[name.replace(".default", "")])
    with tempfile.TemporaryDirectory() as out:
        config = KTOConfig(output_dir=out, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=1e-3,
                           lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, beta=0.1, logging_steps=1,
                           train_sampling_strategy="sequential", use_cpu=True, report_to=[], save_strategy="no", bf16=False,
                           gradient_checkpointing=False, adam_beta2=0.999, optim="adamw_torch", **WEIGHTS)
        trainer = KTOTrainer(model=model, args=config, train_dataset=Dataset.from_list(answers), processing_class=tokenizer)
        logged = []
        log = trainer._metrics["train"]
        trainer.log = lambda logs, *_: logged.append({**logs, **{k: v[-1] for k, v in log.items() if v}}) or log.clear()
        trainer.train()
    print("reference points", [round(row["kl"], 4) for row in logged[:STEPS]])
    keys = ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "grad_norm"]
    return [[float(f"{float(row[key]):.9g}") for key in keys] for row in logged[:STEPS]]


def main():
    path = Path(sys.argv[1]) / "preference/llama.json"
    written = path.read_text()
    found = json.loads(written)
    written = re.sub(r',\n "kto_steps".*', "\n}\n", written, flags=re.S)
    rows = lambda rows: "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
    added = [("kto_steps", json.dumps(["loss", "rewards.chosen", "rewards.rejected", "rewards.margin", "gradient_norm"]))]
    added += [(name, rows(steps(path.parent.parent, found["pairs"], name != "kto"))) for name in ("kto", "kto_lora")]
    body = written.rstrip().removesuffix("}").rstrip()
    path.write_text(body + "".join(f',\n "{name}": {value}' for name, value in added) + "\n}\n")


main()
