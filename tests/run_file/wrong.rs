//! A hundred invalid run files.

use gapless::run::RunConfig;

use crate::{Place, TINY};

/// Changes to the tiny run file, each with the words that the error must contain.
const WRONG: &[(&str, &str, &[&str])] = &[
    ("steps = 4", "steps = 0", &["steps (line 2)", "at least one"]),
    ("steps = 4", "steps = -1", &["line 2", "steps", "invalid value"]),
    ("steps = 4", "steps = 4\nepochs = 2", &["epochs (line 3)", "leave one of them out"]),
    ("steps = 4", "epochs = 0", &["epochs (line 2): is 0", "set it above 0"]),
    ("steps = 4", "steps = \"4\"", &["line 2", "invalid type: string"]),
    ("steps = 4", "step = 4", &["line", "duplicate key"]),
    ("steps = 4", "stepz = 4", &["line 2", "unknown field `stepz`", "did you mean `steps`"]),
    ("seed = 3", "seed = 3.5", &["line 3", "invalid type: floating point"]),
    ("seed = 3", "seed = 3\nseed = 4", &["line 4", "duplicate key"]),
    ("seed = 3", "seed =", &["line 3"]),
    ("[model.gpt]", "[model.gtp]", &["line 5", "unknown variant `gtp`", "did you mean `gpt`"]),
    ("[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16", "", &["missing field `model`"]),
    ("layers = 1", "layrs = 1", &["line 6", "did you mean `layers`"]),
    ("layers = 1", "layers = true", &["line 6", "invalid type: boolean"]),
    ("[data]\npath = \"DIR/text.txt\"", "[data]", &["data.path: is missing", "to learn from"]),
    ("text.txt", "nowhere.txt", &["data.path (line 11)", "nowhere.txt", "file or folder that exists"]),
    ("vocabulary = 256", "vocabulary = 100", &["data.vocabulary (line 12)", "at least 256"]),
    ("vocabulary = 256", "tokenizer = \"DIR/none.json\"", &["data.tokenizer (line 12)", "tokenizer.json"]),
    (
        "vocabulary = 256",
        "vocabulary = 256\ntokenizer = \"DIR/text.txt\"",
        &["data.vocabulary (line 12)", "leave one of them out"],
    ),
    ("vocabulary = 256", "vocab = 256", &["line 12", "did you mean `vocabulary`"]),
    ("vocabulary = 256", "format = \"chats\"", &["line 12", "unknown variant `chats`", "did you mean `chat`"]),
    (
        "vocabulary = 256",
        "format = \"prompt\"",
        &["data.format (line 12)", "text.txt is not a .jsonl or .parquet file"],
    ),
    ("vocabulary = 256", "vocabulary = 256\nanswers = \"last\"", &["data.answers (line 13)", "set data.format"]),
    ("text.txt\"", "lines.jsonl\"\nformat = \"chat\"", &["data.format (line 12)", "name a data.tokenizer"]),
    ("vocabulary = 256", "isolate_documents = 1", &["line 12", "invalid type: integer"]),
    ("batch = 4", "batch = 0", &["step.batch (line 17)", "at least 1"]),
    ("batch = 4", "batch = 3", &["step.micro_batches (line 18)", "3 sequences do not divide into 2", "multiple of"]),
    ("precision = \"f32\"", "[mesh]\ndata = 0", &["mesh.data (line 21)", "at least 1"]),
    (
        "precision = \"f32\"",
        "[mesh]\ndata = 4",
        &["step.micro_batches (line 18)", "4 ranks that share the batch", "multiple of"],
    ),
    ("precision = \"f32\"", "[mesh]\npipeline = -2", &["line 21", "invalid value"]),
    ("precision = \"f32\"", "[mesh]\npipelines = 2", &["line 21", "did you mean `pipeline`"]),
    ("precision = \"f32\"", "[mesh]\nexpert = 2", &["mesh.expert (line 21)", "0 experts", "a model without"]),
    ("precision = \"f32\"", "[pipeline]\nschedule = \"1f2b\"", &["line 20", "unknown schedule \"1f2b\"", "1f1b"]),
    (
        "precision = \"f32\"",
        "[pipeline]\nschedule = \"1f1b\"\nchunks = 2\n[mesh]\npipeline = 2",
        &["pipeline.schedule (line 21)", "1f1b runs 1 chunk"],
    ),
    ("micro_batches = 2", "micro_batches = 0", &["step.micro_batches (line 18)", "at least 1"]),
    ("micro_batches = 2", "microbatches = 2", &["line 18", "did you mean `micro_batches`"]),
    ("sequence = 16", "sequence = 0", &["step.sequence (line 19)"]),
    ("sequence = 16", "sequence = [16]", &["line 19", "invalid type: sequence"]),
    ("device = \"cpu\"", "device = \"gpu\"", &["line 4", "unknown device", "cuda:0"]),
    ("device = \"cpu\"", "device = \"cuda:x\"", &["line 4", "not the number of a GPU"]),
    ("precision = \"f32\"", "precision = \"f16\"", &["line 20", "unknown variant `f16`", "`bf16`"]),
    ("device = \"cpu\"", "device = \"cpu\"\ntf32 = true", &["tf32 (line 5)", "only GPUs", "leave it out"]),
    (
        "precision = \"f32\"",
        "precision = \"bf16\"\n[optimizer]\nstochastic_rounding = true",
        &["optimizer.stochastic_rounding (line 22)", "masters", "pure_bf16"],
    ),
    (
        "precision = \"f32\"",
        "precision = \"pure_bf16\"\n[optimizer]\nname = \"lion\"\nstochastic_rounding = true",
        &["optimizer.stochastic_rounding (line 23)", "rounds to the nearest", "adamw"],
    ),
    ("threads = 1", "threads = 100000", &["threads (line 1)", "more than the maximum of 1024", "0 for all"]),
    ("threads = 1", "thread = 1", &["line 1", "did you mean `threads`"]),
    ("[evaluation]", "[evalution]", &["line 23", "did you mean `evaluation`"]),
    ("[checkpoints]\nevery = 2", "[checkpoints]\nkeep_last = 0", &["checkpoints.keep_last (line 27)", "at least one"]),
    ("steps = 4", "max_minutes = 0", &["max_minutes (line 2)", "not a valid time", "above 0"]),
    ("steps = 4", "max_minutes = \"1h\"", &["line 2", "invalid type: string"]),
    (
        "[evaluation]\nevery = 2",
        "[evaluation]\npatience = 2\nevery = 0",
        &["evaluation.patience (line 24)", "no evaluations"],
    ),
    (
        "[evaluation]\nevery = 2",
        "[evaluation]\npath = \"nowhere.txt\"",
        &["evaluation.path (line 24)", "no nowhere.txt", "exists"],
    ),
    ("[checkpoints]\nevery = 2", "[checkpoints]\nminutes = -1", &["checkpoints.minutes (line 27)", "above 0"]),
    ("[checkpoints]\nevery = 2", "[checkpoints]\nkeep_best = -1", &["line 27", "invalid value"]),
    ("[checkpoints]\nevery = 2", "[checkpoints]\nkeep = 2", &["line 27", "did you mean `keep_last`"]),
    ("[sample]", "[memory]\nbudget = 1000\nrecompute = \"layers\"\n[sample]", &["memory.budget (line 30)", "leave"]),
    ("[sample]", "[memory]\nrecompute = \"some\"\n[sample]", &["line 30", "not a policy", "first:8"]),
    ("[sample]", "[memory]\nbudget = \"much\"\n[sample]", &["line 30", "not a number of bytes", "600MiB"]),
    (
        "[sample]",
        "[optimizer]\nname = \"adam\"\n[sample]",
        &["line 30", "unknown variant `adam`", "did you mean `adamw`"],
    ),
    ("[sample]", "[optimizer]\nlr = 0.1\n[sample]", &["line 30", "unknown field `lr`"]),
    ("[sample]", "[learning_rate]\npeak = -1.0\n[sample]", &["learning_rate (line 29)", "at least 0"]),
    (
        "[sample]",
        "[learning_rate]\npeak = 1e-4\nfloor = 1e-3\n[sample]",
        &["learning_rate (line 29)", "lower the floor"],
    ),
    ("[sample]", "[learning_rate]\nshape = \"cosin\"\n[sample]", &["line 30", "did you mean `cosine`"]),
    (
        "[sample]",
        "[learning_rate]\nshape = \"wsd\"\ndecay_steps = 9\n[sample]",
        &["learning_rate (line 29)", "shorten"],
    ),
    ("prompt = \"to be\"", "prompt = 5", &["line 30", "invalid type: integer"]),
    ("[sample]", "[trainable.lora]\nrang = 4\n[sample]", &["line 30", "did you mean `rank`"]),
    ("[sample]", "[memory]\nbudget = -5\n[sample]", &["line 30", "invalid value"]),
    ("tokens = 4", "tokens = -4", &["line 31", "invalid value"]),
    ("tokens = 4", "token = 4", &["line 31", "did you mean `tokens`"]),
    ("steps = 4", "steps = true", &["line 2", "invalid type: boolean"]),
    ("steps = 4", "steps = 4.5", &["line 2", "invalid type: floating point"]),
    ("steps = 4", "steps = 18446744073709551616", &["line 2"]),
    ("seed = 3", "seed = \"three\"", &["line 3", "invalid type: string"]),
    ("seed = 3", "seeds = 3", &["line 3", "did you mean `seed`"]),
    ("steps = 4", "max_minute = 5", &["line 2", "did you mean `max_minutes`"]),
    ("layers = 1", "layers = 1.0", &["line 6", "invalid type: floating point"]),
    ("heads = 2", "heads = \"2\"", &["line 7", "invalid type: string"]),
    ("width = 16", "width = -16", &["line 8", "invalid value"]),
    ("width = 16", "widht = 16", &["line 8", "did you mean `width`"]),
    ("[model.gpt]", "[model.gpt]\nlayers = 2", &["line 7", "duplicate key"]),
    ("[model.gpt]", "[model.llama]\nlayers = 1\n[model.gpt]", &["model"]),
    ("vocabulary = 256", "vocabulary = -256", &["line 12", "invalid value"]),
    ("vocabulary = 256", "vocabulary = \"256\"", &["line 12", "invalid type: string"]),
    ("validation_every = 8", "validation_every = -8", &["line 13", "invalid value"]),
    ("validation_every = 8", "validate_every = 8", &["line 13", "did you mean `validation_every`"]),
    ("cache = \"DIR/cache\"", "cache = 5", &["line 14", "invalid type: integer"]),
    ("sequence = 16", "seqence = 16", &["line 19", "did you mean `sequence`"]),
    ("sequence = 16", "sequence = -1", &["line 19", "invalid value"]),
    ("threads = 1", "threads = -1", &["line 1", "invalid value"]),
    ("precision = \"f32\"", "precision = \"fp32\"", &["line 20", "unknown variant `fp32`", "did you mean `f32`"]),
    ("precision = \"f32\"", "[pipeline]\nchunks = 0", &["pipeline.chunks (line 21)", "at least 1"]),
    ("precision = \"f32\"", "[pipeline]\nschedules = \"1f1b\"", &["line 21", "did you mean `schedule`"]),
    ("precision = \"f32\"", "[mesh]\nexpert = 1.5", &["line 21", "invalid type: floating point"]),
    ("precision = \"f32\"", "[mesh]\ndata = 3", &["step.micro_batches (line 18)", "multiple of"]),
    ("[evaluation]\nevery = 2", "[evaluation]\nevery = \"2\"", &["line 24", "invalid type: string"]),
    ("[evaluation]\nevery = 2", "[evaluation]\npatience = -1", &["line 24", "invalid value"]),
    ("[checkpoints]\nevery = 2", "[checkpoints]\nminutes = \"5\"", &["line 27", "invalid type: string"]),
    ("[checkpoints]", "[checkpoint]", &["line 26", "did you mean `checkpoints`"]),
    ("[sample]", "[samples]", &["line 29", "did you mean `sample`"]),
    ("tokens = 4", "temperature = \"hot\"", &["line 31", "invalid type: string"]),
    ("tokens = 4", "top_k = -1", &["line 31", "invalid value"]),
    ("[sample]", "[optimizer]\nname = \"lino\"\n[sample]", &["line 30", "did you mean `lion`"]),
    ("[sample]", "[optimizer]\nbeta_1 = 0.9\n[sample]", &["line 30", "did you mean `beta1`"]),
    ("[sample]", "[learning_rate]\nwarmup = 5\n[sample]", &["line 30", "unknown field `warmup`"]),
    ("[sample]", "[trainable]\nonly = 3\n[sample]", &["line"]),
    ("[sample]", "[loss]\nlabel_smoothing = 1.0\n[sample]", &["loss.label_smoothing (line 30)", "below 1"]),
    ("[sample]", "[loss]\nz_los = 1e-4\n[sample]", &["line 30", "did you mean `z_loss`"]),
    ("[sample]", "[optimizer]\nmax_value = 0.0\n[sample]", &["optimizer.max_value (line 30)", "above 0"]),
    ("[sample]", "[optimizer]\naverage = 1.5\n[sample]", &["optimizer.average (line 30)", "below 1"]),
    (
        "vocabulary = 256",
        "vocabulary = 256\nmix = [{ path = \"DIR/text.txt\", weight = 1.0 }]",
        &["data.mix (line 13)", "their sum below 1"],
    ),
    ("vocabulary = 256", "mix = [{ path = \"DIR/none\", weight = 0.5 }]", &["data.mix (line 12)", "there is no"]),
    ("vocabulary = 256", "mix = [{ path = \"DIR/text.txt\" }]", &["line 12", "missing field `weight`"]),
    ("[sample]", "[guard]\nnorm = 0.5\n[sample]", &["guard.norm (line 30)", "above 1"]),
    ("[sample]", "[guard]\npatience = 0\n[sample]", &["guard.patience (line 30)", "at least 1"]),
    (
        "[sample]",
        "[[optimizer.groups]]\nnames = [\"h\"]\nweight_decy = 0\n[sample]",
        &["line 31", "did you mean `weight_decay`"],
    ),
    ("[sample]", "[[optimizer.groups]]\nnames = []\n[sample]", &["optimizer.groups", "a group has no names"]),
];

/// For each wrong file, the exit code is 2, the error contains the key with its line and a remedy, and nothing is
/// written.
#[test]
fn wrong_files_are_refused_by_key_line_and_remedy() {
    let place = Place::new();
    for (from, to, expected) in WRONG {
        assert!(TINY.contains(from), "{from}");
        let file = place.file(&TINY.replacen(from, to, 1)).display().to_string();
        let output = place.gapless(&["train", &file, "--out", "out"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{to}: {said}");
        for part in *expected {
            assert!(said.contains(part), "{to}: {part:?} is not in {said}");
        }
        assert!(
            !place.path().join("out").exists() && !place.path().join("cache").exists(),
            "{to}: something was written"
        );
    }
    let groups = "[[optimizer.groups]]\nnames = [\"h\"]\n".repeat(257);
    let file = place.file(&(TINY.to_owned() + &groups)).display().to_string();
    let output = place.gapless(&["train", &file, "--out", "out"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("257 are more than the maximum of 256"), "{said}");
    let file = place.file(TINY).display().to_string();
    for (assignments, part) in [
        (&["steps"][..], "\"steps\" is not an assignment: it has no ="),
        (&["=4"], "it has no key"),
        (&["step.batch=x"], "--set step.batch=x: invalid type: string"),
        (&["step.bach=4"], "did you mean `batch`"),
        (&["steps.more=4"], "steps is not a table"),
        (&["step.batch=3"], "step.micro_batches"),
        // Of the two assignments, only the wrong one is reported.
        (&["step.batch=4", "step.precision=f64"], "--set step.precision=f64: unknown variant `f64`"),
        (&["step.precision=f64", "step.batch=4"], "--set step.precision=f64: unknown variant `f64`"),
        // The error contains the former name of the key, as it was given.
        (&["step.dtype=f64"], "--set step.dtype=f64: unknown variant `f64`"),
    ] {
        let flags = assignments.iter().flat_map(|assignment| ["--set", assignment]);
        let output = place.gapless(&["train", &file].into_iter().chain(flags).collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(part), "{assignments:?}: {said}");
    }
    // If no key is similar to the unknown key, no key is suggested.
    let output = place.gapless(&["train", &file, "--set", "step.quux=4"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("unknown field `quux`") && !said.contains("did you mean"), "{said}");
    let output = place.gapless(&["train", "nowhere.toml"]);
    assert!(
        output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("cannot read nowhere.toml")
    );
}

/// Values that would crash the process, or keep it busy forever, are refused with their limit when the file is read.
#[test]
fn numbers_without_measure_and_lists_for_tables_are_refused() {
    let place = Place::new();
    let gpt = "[model.gpt]\nlayers = 1\nheads = 2\nwidth = 16";
    let llama =
        |more: &str| format!("[model.llama]\nlayers = 1\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32\n{more}");
    let moe = |more: &str| format!("[model.moe]\nexpert_hidden = 8\n{more}\n[model.moe.llama]\nlayers = 1\nwidth = 16");
    for (from, to, key, why) in [
        ("vocabulary = 256", "vocabulary = 4000000000".to_owned(), "data.vocabulary", "above the maximum"),
        ("vocabulary = 256", "vocabulary = 9223372036854775807".to_owned(), "data.vocabulary", "above the maximum"),
        ("steps = 4", "steps = 9007199254740993".to_owned(), "steps", "above the maximum of 9007199254740992"),
        ("batch = 4", "batch = 1000000000000".to_owned(), "step.batch", "above the maximum"),
        ("batch = 4", "batch = 134217728".to_owned(), "step.batch", "more than the maximum of 268435456 tokens"),
        ("micro_batches = 2", "micro_batches = 1000000000".to_owned(), "step.micro_batches", "above the maximum"),
        ("sequence = 16", "sequence = 9223372036854775807".to_owned(), "step.sequence", "above the maximum"),
        ("precision = \"f32\"", "[mesh]\ndata = 100000000".to_owned(), "mesh.data", "above the maximum"),
        ("layers = 1", "layers = 4294967296".to_owned(), "model.gpt", "layers is 4294967296"),
        ("width = 16", "width = 9223372036854775807".to_owned(), "model.gpt", "width is"),
        ("width = 16", "width = 16\nlayer_norm_eps = nan".to_owned(), "model.gpt", "layer_norm_eps is NaN"),
        ("width = 16", "width = 16\nhidden = 0".to_owned(), "model.gpt", "hidden is 0"),
        (gpt, llama("attention_cap = 1e300"), "model.llama", "attention_cap is"),
        (gpt, llama("attention_cap = 1e-310"), "model.llama", "attention_cap is"),
        (gpt, llama("query_scale = 1e-320"), "model.llama", "query_scale is"),
        (gpt, llama("logit_cap = inf"), "model.llama", "logit_cap is inf"),
        (gpt, llama("head_size = 1048577"), "model.llama", "head_size is"),
        (gpt, moe("[model.moe.router]\nexperts = 1000000000000"), "model.moe", "router.experts is"),
        (gpt, "[model]\ngpt = [1, 1, 8]".to_owned(), "model.gpt", "is a list"),
        (gpt, "[model]\nmoe = { llama = [1, 2] }".to_owned(), "model.moe.llama", "is a list"),
        ("[evaluation]\nevery = 2", "[optimizer]\ngroups = [[1, 2]]".to_owned(), "optimizer.groups", "is a list"),
    ] {
        let error = RunConfig::read(&place.file(&TINY.replace(from, &to)), &[]).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(why), "{to}: {error}");
    }
    let text = TINY.replace("[evaluation]\nevery = 2", "evaluation = [2]");
    let text = format!("evaluation = [2]\n{}", text.replace("evaluation = [2]\n", ""));
    let error = RunConfig::read(&place.file(&text), &[]).unwrap_err().to_string();
    assert!(error.contains("evaluation (line 1): is a list"), "{error}");
    let error = RunConfig::read(&place.file(TINY), &["evaluation=[1]".into()]).unwrap_err().to_string();
    assert!(error.contains("evaluation: is a list"), "{error}");
    if cfg!(unix) {
        let error = RunConfig::read("/dev/zero".as_ref(), &[]).unwrap_err().to_string();
        assert!(error.contains("it is a pipe, a device or a socket"), "{error}");
    }
}
