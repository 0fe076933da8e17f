//! Compares the eager lowering with recordings of PyTorch. The peak of live bytes must be equal. The waste of
//! PyTorch's allocator must agree within half a percentage point. Experts get the recorded numbers of rows. With
//! `GAPLESS_SLOW_TESTS`, all recordings in the larger collection next to the repository are used.
//!
//! Recordings with changing sequence lengths are not compared.

use std::cell::RefCell;
use std::collections::HashMap;

use gapless::alloc::{Buffer, Problem, csv, lower_bound};
use gapless::allocators::{Kind, Requests, replay};
use gapless::engine::compile::StagePartition;
use gapless::run::RunConfig;
use gapless::step::{ConfigError, StartUp, Step};
use gapless_testing::evidence;
use serde_json::Value;

/// Creates the step that some keys describe, one key per line.
fn step(keys: &str) -> Result<Step, ConfigError> {
    let keys: Vec<String> = keys.lines().map(str::to_owned).collect();
    Step::new(&RunConfig::parse("", &keys)?)
}

/// Returns the step and the rank of a recording, with the places where stages begin. Returns `None` if our models
/// cannot express the step.
fn step_of(entry: &Value) -> Option<(Step, Vec<String>, usize)> {
    let config = &entry["config"];
    let number = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
    let (layers, heads, width, hidden) = (number("L"), number("H"), number("D"), number("FF"));
    // Each of four ranks has two of the eight experts.
    let expert_ranks = if config["moe"] == "ep" { 4 } else { 1 };
    let (ranks, chunks) = (number("p").max(1), number("v").max(1));
    let model = match config["kind"].as_str()? {
        "gpt2" => format!("gpt:vocabulary=50304,layers={layers},heads={heads},width={width}"),
        "moe" | "pipe" if config.get("moe").is_some() => format!(
            "moe:llama.vocabulary=32000,llama.layers={},llama.heads={heads},llama.kv_heads={heads},llama.width={width},\
             llama.hidden={hidden},router.experts={},router.balance_loss=0.0,expert_hidden={hidden}",
            layers * ranks,
            number("E"),
        ),
        "llama" | "pipe" if config.get("moe").is_none() => format!(
            "llama:vocabulary=32000,layers={},heads={heads},kv_heads={heads},width={width},hidden={hidden}",
            layers * ranks
        ),
        _ => return None,
    };
    let micro_batches = number("accum").max(number("microbatches"));
    let (batch, sequence) = (number("mb") * micro_batches * expert_ranks, number("seq"));
    let lowering = if config["mode"] == "amp" { "eager-amp" } else { "eager" };
    let schedule = if chunks > 1 { "interleaved" } else { "1f1b" };
    let recompute = if config["ckpt"] == true { "layers" } else { "none" };
    let step = step(&format!(
        "model = '{model}'\nbatch = {batch}\nmicro_batches = {micro_batches}\nsequence = {sequence}\nprecision = 'bf16'\n\
         lowering = '{lowering}'\npipeline_ranks = {ranks}\nexpert_ranks = {expert_ranks}\nschedule = '{schedule}'\nchunks = {chunks}\n\
         recompute = '{recompute}'"
    ));
    // All stages have the same number of layers.
    let per_stage = layers / chunks;
    let cuts = (1..ranks * chunks).map(|stage| format!("model.layers.{}", stage * per_stage)).collect();
    Some((step.unwrap(), cuts, number("rank")))
}

/// Returns one list per layer, in the order of the forwards: the row count of each expert that gets rows. The recording
/// has only the sizes of buffers, so both counts are derived from patterns of sizes, as in `recorded_moe` of
/// `gapless-allocators`. An expert's forward allocates four equal buffers (gate, silu, up, product) and then its
/// result. The dispatch to a rank's experts allocates a buffer of rows, one of their indices, and one of the gathered
/// rows.
fn recorded_rows(entry: &Value) -> Vec<Vec<u64>> {
    let config = &entry["config"];
    if config.get("moe").is_none() {
        return Vec::new();
    }
    let number = |key: &str| config[key].as_u64().unwrap_or(0);
    let (width, hidden) = (2 * number("D"), 2 * number("FF"));
    let table = recorded(entry, "iteration").unwrap();
    let mut buffers: Vec<_> = table.buffers().iter().filter(|buffer| buffer.bytes != 8_519_680).collect();
    buffers.sort_by_key(|buffer| buffer.lifetime.start);
    let sizes: Vec<u64> = buffers.iter().map(|buffer| buffer.bytes).collect();
    // In the loop over all experts, each token has two choices.
    let mut of_rank = 2 * number("mb") * number("seq");
    let (mut layers, mut layer): (Vec<Vec<u64>>, Vec<u64>) = Default::default();
    for window in sizes.windows(5) {
        let places = window[1] / 8;
        if config["moe"] == "ep" && places > 0 && window[..3] == [places * width, places * 8, places * width] {
            of_rank = places;
        }
        let rows = window[0] / hidden;
        if rows > 0 && window[..4] == [rows * hidden; 4] && window[4] == rows * width {
            layer.push(rows);
            if layer.iter().sum::<u64>() == of_rank {
                layers.push(std::mem::take(&mut layer));
            }
        }
    }
    if config["ckpt"] == true {
        let of_forward = number("L") as usize;
        layers = layers.chunks(2 * of_forward).flat_map(|layers| layers[..of_forward].to_vec()).collect();
    }
    layers
}

/// Returns the entries of the recordings.
fn entries() -> Vec<Value> {
    let manifest = std::fs::read_to_string(evidence("pytorch").join("manifest.json")).unwrap();
    serde_json::from_str(&manifest).unwrap()
}

/// Reads a table of a recording: its steady step (`iteration`) or its first steps (`full`). Returns `None` if the
/// collection does not have this table.
fn recorded(entry: &Value, table: &str) -> Option<Problem> {
    let path = evidence("pytorch").join(entry[table]["file"].as_str()?);
    path.exists().then(|| csv::read(gapless_testing::open(&path).unwrap()).unwrap().problem)
}

#[test]
fn steps_allocate_what_the_library_does() {
    let entries = entries();
    let (mut wrong, mut judged) = (String::new(), 0);
    for entry in &entries {
        let name = entry["name"].as_str().unwrap();
        let Some((mut step, cuts, rank)) = step_of(entry) else { continue };
        step.options.pipeline.cut = StagePartition::Before(cuts);
        let graph = step.record().unwrap();
        // Row counts are used in the order of the forwards. A layer that is recomputed gets the counts of its forward
        // again.
        let recorded = RefCell::new((recorded_rows(entry).into_iter(), HashMap::new()));
        let rows = |micro_batch: usize, layer: &str| -> Vec<u64> {
            let (next, known) = &mut *recorded.borrow_mut();
            known
                .entry((micro_batch, layer.to_owned()))
                .or_insert_with(|| next.next().expect("a recorded layer"))
                .clone()
        };
        let problem = step.eager_routed(&graph, rank, &rows).unwrap();
        assert_eq!(recorded.borrow().0.len(), 0, "{name}: layers that nobody asked for");
        let requests = Requests::new(&problem);
        let mut pytorch = Kind::PYTORCH.build(80 << 30, &problem, &requests);
        let wasted = replay(&requests, &mut *pytorch, 3).unwrap().fragmentation();
        let recorded = &entry["iteration"]["replay_3_iterations"]["default"];
        let live = recorded["live_peak"].as_u64().unwrap();
        let waste = recorded["fragmentation"].as_f64().unwrap();
        let [percent, more] = [wasted, wasted - waste].map(|part| 100.0 * part);
        if entry["config"].get("moe").is_some() {
            assert_even_rows_on_page(name, &step.eager(&graph, rank).unwrap(), live, waste);
        }
        let line = format!("{name}: {} bytes of {live}; waste {percent:.2} %, {more:+.2} points", requests.peak_live());
        println!("{line}");
        if requests.peak_live() != live || more.abs() > 0.5 {
            wrong += &(line + "\n");
        }
        judged += 1;
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(judged >= 12, "{judged} of {} recordings are of models that can be said", entries.len());
}

/// The first steps of a run have the peaks of the recording, to the byte: the first step without states, and the whole
/// run. docs/sweep.md has these peaks. The mixture is left out: in two layers, its rank receives no rows, which the sizes
/// of buffers do not show.
#[test]
fn runs_start_as_those_of_the_library() {
    let mut judged = 0;
    for entry in entries() {
        let Some(table) = recorded(&entry, "full").filter(|_| entry["config"].get("moe").is_none()) else { continue };
        let name = entry["name"].as_str().unwrap();
        let Some((mut step, cuts, rank)) = step_of(&entry) else { continue };
        step.options.pipeline.cut = StagePartition::Before(cuts);
        let graph = step.record().unwrap();
        let steps = entry["config"]["iters"].as_u64().unwrap_or(3) as usize;
        let run = step.eager_run(&graph, rank, steps).unwrap();
        // The states are the last of the buffers that stay. Until then, the first step has its peak.
        let (end, buffers) = (table.end(), table.buffers());
        let states = buffers.iter().filter(|buffer| buffer.lifetime.end == end).map(|buffer| buffer.lifetime.start);
        let first_step = states.max().unwrap();
        let started = buffers
            .iter()
            .filter(|buffer| buffer.lifetime.start <= first_step)
            .map(|buffer| Buffer::new(buffer.lifetime.start..buffer.lifetime.end.min(first_step + 1), buffer.bytes));
        let first = lower_bound(&Problem::new(started.collect()).unwrap());
        let all = entry["full"]["replay_1_iteration"]["default"]["live_peak"].as_u64().unwrap();
        assert_eq!((run.peaks[0], lower_bound(&run.table)), (first, all), "{name}");
        assert_eq!(run.peaks.iter().max(), Some(&all), "{name}");
        let waste = entry["full"]["replay_1_iteration"]["default"]["fragmentation"].as_f64().unwrap();
        let requests = Requests::new(&run.table);
        let mut pytorch = Kind::PYTORCH.build(80 << 30, &run.table, &requests);
        let wasted = replay(&requests, &mut *pytorch, 1).unwrap().fragmentation();
        assert!((wasted - waste).abs() < 0.005, "{name}: {wasted}, recorded {waste}");
        let StartUp { before_bytes, states_bytes } = run.start_up;
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let line = format!(
            "| `{name}` | {steps} | {:.3} | {:.3} | {:.3} | {:.3} | {:.2} % | {:.2} % |",
            gib(before_bytes),
            gib(states_bytes),
            gib(first),
            gib(all),
            100.0 * waste,
            100.0 * wasted
        );
        println!("{line}");
        if ["gpt2_124m_amp_s1024_ckpt", "llama7b_4L_full_s4096"].contains(&name) {
            gapless_testing::assert_on_page("docs/sweep.md", &line);
        }
        judged += 1;
    }
    assert!(judged >= 1, "no recording has the first steps of a run");
}

/// docs/sweep.md says how far the table of a mixture is from its recording if every expert has the same chance.
fn assert_even_rows_on_page(name: &str, problem: &Problem, live: u64, waste: f64) {
    let requests = Requests::new(problem);
    let mut pytorch = Kind::PYTORCH.build(80 << 30, problem, &requests);
    let wasted = replay(&requests, &mut *pytorch, 3).unwrap().fragmentation();
    let more = requests.peak_live() as f64 / live as f64 - 1.0;
    let [more, recorded, table] = [more, waste, wasted].map(|part| 100.0 * part);
    let (experts, rows) = match name {
        "moe8_seq_a0.3_s4096_ckpt" => ("all on one rank", "skewed, 0.3"),
        "moe8_ep_a0.3_s4096" => ("two on each of four ranks", "skewed, 0.3"),
        "moe8_ep_pp4r1_v2_m16_a1.0_s4096" => ("the same, in a pipeline", "skewed, 1.0"),
        // Of the larger collection.
        _ => return,
    };
    let line = format!("| `{name}` | {experts} | {rows} | {more:+.1} % | {recorded:.2} % | {table:.2} % |");
    gapless_testing::assert_on_page("docs/sweep.md", &line);
}

#[test]
fn stages_may_begin_inside_a_layer() {
    let mut step = step(
        "model = 'gpt:vocabulary=64,layers=3,heads=2,width=32'\nbatch = 4\nmicro_batches = 4\nsequence = 16\npipeline_ranks = 2\n\
         lowering = 'eager'",
    )
    .unwrap();
    step.options.pipeline.cut = StagePartition::Before(vec!["h.1.mlp".to_owned()]);
    let graph = step.record().unwrap();
    for rank in 0..2 {
        let problem = step.eager(&graph, rank).unwrap();
        let requests = Requests::new(&problem);
        let lasting: u64 = requests.persistent().iter().map(|&id| requests.bytes(id)).sum();
        assert!(lasting < requests.peak_live(), "{rank}: {lasting} of {}", requests.peak_live());
    }
}

#[test]
fn mixtures_have_rules() {
    let qwen = "moe:llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=32,router.experts=8,router.top_k=3,\
                router.renormalise=false,expert_hidden=16,shared_hidden=32,shared_gate=true";
    let check = |text: &str| {
        let text = format!("model = '{qwen}'\nbatch = 8\nmicro_batches = 2\nsequence = 16\npipeline_ranks = 2\n{text}");
        let step = step(&text).unwrap();
        let graph = step.record().unwrap();
        let peak = |problem| Requests::new(&problem).peak_live();
        for rank in 0..2 {
            let one = |_: usize, _: &str| vec![0, 1];
            let [all, one] =
                [step.eager(&graph, rank), step.eager_routed(&graph, rank, &one)].map(|x| peak(x.unwrap()));
            assert!(one < all, "{one} bytes with one row for each layer, {all} with all: {text}");
        }
    };
    check("lowering = 'eager'");
    check("lowering = 'eager'\nexpert_ranks = 2");
    check("lowering = 'eager'\nexpert_ranks = 4\nprecision = 'bf16'\nrecompute = 'layers'");
    check("lowering = 'eager-amp'\nexpert_ranks = 2\nprecision = 'bf16'");
    check("lowering = 'eager-amp'\nprecision = 'bf16'\nrecompute = 'layers'");
}

/// Stages that are balanced by time meet inside mixtures of experts. The program of an eager framework runs a mixture as
/// one function, so the mixture belongs to one stage.
#[test]
fn mixtures_are_not_split_between_chunks() {
    let moe = "moe:llama.vocabulary=64,llama.layers=5,llama.heads=8,llama.kv_heads=8,llama.width=1024,router.experts=8,router.top_k=2,\
               expert_hidden=2048";
    for chunks in [2, 3] {
        let text = format!(
            "model = '{moe}'\nbatch = 8\nmicro_batches = 4\nsequence = 128\npipeline_ranks = 2\nschedule = 'interleaved'\n\
             chunks = {chunks}\nlowering = 'eager'"
        );
        let lasting = |text: &str| {
            let step = step(text).unwrap();
            let graph = step.record().unwrap();
            let of_rank = |rank| {
                let requests = Requests::new(&step.eager(&graph, rank).unwrap());
                requests.persistent().iter().map(|&id| requests.bytes(id)).sum::<u64>()
            };
            of_rank(0) + of_rank(1)
        };
        // Every parameter is on one rank, wherever stages meet. Both ranks have rotary tables.
        let one_chunk = text.replace(&format!("chunks = {chunks}"), "chunks = 1").replace("'interleaved'", "'1f1b'");
        let [many, one] = [&text, &one_chunk].map(|text| lasting(text));
        assert_eq!(many, one, "{chunks} chunks");
    }
}

#[test]
fn operations_without_a_rule_are_named() {
    let check = |text: &str, expected: &str| {
        let error = match step(&format!("batch = 2\nsequence = 16\nlowering = 'eager'\n{text}")) {
            Ok(step) => step.eager(&step.record().unwrap(), 0).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(expected), "{error}");
    };
    let gpt = "model = 'gpt:vocabulary=64,layers=2,heads=2,width=32'";
    let moe = "llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=32,expert_hidden=16";
    check(&format!("model = 'moe:{moe},router.jitter=0.1'"), "what jitter allocates");
    check(&format!("model = 'moe:{moe},router.z_loss=0.1'"), "what log_sum_exp allocates");
    let capacity = "router.capacity.factor=1.25,router.capacity.drop=\"lightest\"";
    check(&format!("model = 'moe:{moe},{capacity}'"), "what unplaced");
    let chosen = "router.choice=\"experts\",router.balance_loss=0.0";
    check(&format!("model = 'moe:{moe},{capacity},{chosen}'"), "what unplaced");
    let latent = "latent.kv_rank=8,latent.plain_size=8,latent.rotated_size=4,latent.value_size=8";
    check(&format!("model = 'moe:{moe},{latent}'"), "allocates in an eager framework is unknown");
    check(&format!("{gpt}\nrecompute = 'ops:gelu'"), "anything but layers");
    check(&format!("{gpt}\npipeline_ranks = 2\nmicro_batches = 2\nschedule = 'zb-h1'"), "splits the backward");
    check(&format!("{gpt}\noptimizer = 'galore'"), "only adamw is supported");
}
