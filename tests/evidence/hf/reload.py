#!/usr/bin/env python3
"""Opens saved folders and adapters with transformers and PEFT, and compares their losses.

    python reload.py CASES

CASES is a JSON list of {name, folder, adapter, tokens, targets, loss}: a model folder, the folder of an adapter on it or
null, ids of two sequences and the ids that follow them, and the expected mean loss. Each difference is a line of the output.
"""

import json, os, sys, warnings

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

LOSS = 1e-5


@torch.no_grad()
def differences(case):
    # transformers opens a multimodal model as a whole, and some of them as their text part.
    config = AutoConfig.from_pretrained(case["folder"])
    whole = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    text = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else whole
    load = lambda model: model.from_pretrained(case["folder"], dtype=torch.float32, attn_implementation="eager",
                                               experts_implementation="eager", local_files_only=True, output_loading_info=True)
    model, info = load(whole)
    for what, found in info.items():
        if found:
            yield f"{what}: {sorted(map(str, found))[:4]}"
    if text is not whole:
        model, _ = load(text)
    if case["adapter"]:
        model = PeftModel.from_pretrained(model, case["adapter"])
        result = model.load_adapter(case["adapter"], "again")
        missing = [name for name in result.missing_keys if ".again." in name]
        if missing or result.unexpected_keys:
            yield f"missing {missing[:4]}, unexpected {result.unexpected_keys[:4]}"
    tokens, targets = (torch.tensor(case[part]).reshape(2, -1) for part in ("tokens", "targets"))
    logits = model.eval()(tokens).logits
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).item()
    if not abs(loss - case["loss"]) <= LOSS:
        yield f"the loss is {loss}, not {case['loss']}"


def main():
    for case in json.load(open(sys.argv[1])):
        try:
            found = list(differences(case))
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
        for line in found:
            print(f"{case['name']}: {line}")


if __name__ == "__main__":
    main()
