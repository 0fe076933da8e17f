//! The bytes that Megatron-LM's functional tests measured, beside those of `lowering = "megatron"` for the same steps.
//!
//! `cargo run --release --example published_bytes -- facts.csv.gz` prints the table of docs/published_bytes.md. The file
//! has a line for each measured figure, with the configuration of the run in its other columns.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Parser;
use gapless::run::RunConfig;
use gapless::step::{EagerBytes, Step};

mod csv;
mod facts;
mod torchtitan;

use facts::{Columns, text};

#[derive(Parser)]
#[command(about = "Measured bytes of Megatron-LM's functional tests, and ours")]
struct Args {
    /// The measured figures (CSV, gzipped)
    file: PathBuf,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    case: String,
}

/// A run of Megatron-LM.
struct Case {
    name: String,
    /// The line's other columns, and the settings of its note.
    columns: Columns,
    allocated: u64,
    peak: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let cases: Vec<Case> = cases(&args.file)?.into_iter().filter(|case| case.name.contains(&args.case)).collect();
    println!("{HEAD}");
    let mut errors = Vec::new();
    for case in &cases {
        match case.bytes() {
            Ok(bytes) => {
                println!("{}", case.line(bytes));
                errors.push(case.error(bytes));
            }
            Err(why) => eprintln!("{} is left out: {why:#}", case.name),
        }
    }
    println!("\n{}\n\n{}", Errors::new(errors), torchtitan::HEAD);
    let mut errors = Vec::new();
    for case in torchtitan::cases(&args.file)? {
        let bytes = case.bytes()?;
        println!("{}", case.line(bytes));
        errors.push(case.error(bytes));
    }
    println!("\n{}", Errors::new(errors));
    Ok(())
}

const HEAD: &str = "\
| case | tensor × pipeline × context × data | states, MiB | allocated after a step, MiB | rest, MiB | peak, MiB | measured, MiB | error |
|---|---|---:|---:|---:|---:|---:|---:|";

/// The sizes of the errors of peaks in percent.
struct Errors {
    count: usize,
    median: f64,
    /// The error that nine tenths of the cases do not exceed.
    nine_tenths: f64,
    most: f64,
}

impl Errors {
    fn new(mut errors: Vec<f64>) -> Self {
        errors.iter_mut().for_each(|error| *error = error.abs());
        errors.sort_by(f64::total_cmp);
        let at = |part: f64| errors.get((part * (errors.len().max(1) - 1) as f64) as usize).copied().unwrap_or(0.0);
        Self { count: errors.len(), median: at(0.5), nine_tenths: at(0.9), most: at(1.0) }
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, median, nine_tenths, most } = self;
        write!(
            f,
            "{count} cases; error of the peak: median {median:.1} %, nine tenths within {nine_tenths:.1} %, at most {most:.1} %"
        )
    }
}

/// Reads the dense GPT cases.
fn cases(path: &Path) -> Result<Vec<Case>> {
    let (mut allocated, mut peaks) = (Vec::new(), HashMap::new());
    for mut columns in facts::read(path)? {
        let of = |columns: &Columns, key: &str| text(columns, key).to_owned();
        let name = of(&columns, "table_or_section");
        if !of(&columns, "source").starts_with("NVIDIA/Megatron-LM") || !name.starts_with("gpt/") {
            continue;
        }
        let note = of(&columns, "note");
        let settings = note.split("; ").filter_map(|setting| setting.split_once('='));
        columns.extend(settings.map(|(key, value)| (key.to_owned(), value.to_owned())));
        match &*of(&columns, "quantity") {
            "memory allocated after a step" => allocated.push((name, columns)),
            "peak memory allocated" => _ = peaks.insert(name, of(&columns, "value").parse::<u64>()?),
            _ => {}
        }
    }
    let mut cases = Vec::new();
    for (name, columns) in allocated {
        let has = |key: &str| columns.get(key).is_some_and(|value| !value.is_empty());
        let other = ["gdn", "modelopt", "mup", "frozen", "dsa"];
        let is_dense = !["num-experts", "multi-latent-attention", "mtp-num-layers"].into_iter().any(has);
        let is_known = ["layers", "hidden", "heads", "ffn", "gpus", "dp"].into_iter().all(has);
        let is_sharded = columns["fsdp_zero"].contains("fsdp");
        if is_dense && is_known && !is_sharded && !other.iter().any(|part| columns["model"].contains(part)) {
            let Some(&peak) = peaks.get(&name) else { continue };
            let allocated = columns["value"].parse()?;
            cases.push(Case { name: name["gpt/".len()..].to_owned(), columns, allocated, peak });
        }
    }
    Ok(cases)
}

impl Case {
    fn text(&self, key: &str) -> &str {
        text(&self.columns, key)
    }

    fn number(&self, key: &str) -> usize {
        facts::number(&self.columns, key)
    }

    fn is(&self, key: &str) -> bool {
        self.text(key) == "True"
    }

    /// Returns the run of this case.
    fn run(&self) -> Result<RunConfig> {
        let [tensor, pipeline, context, data] = ["tp", "pp", "cp", "dp"].map(|key| self.number(key));
        let [layers, width, heads, hidden] = ["layers", "hidden", "heads", "ffn"].map(|key| self.number(key));
        let micro_batch = self.number("micro_batch");
        let micro_batches = (self.number("global_batch") / (micro_batch * data)).max(1);
        // A tokenizer of another size than GPT-2's has one more token, for the end of a document.
        let vocabulary = match self.text("vocab").parse::<usize>().unwrap_or(50_257) {
            50_257 => 50_257,
            others => others + 1,
        };
        let (is_gated, has_bias) = (self.is("swiglu"), !self.is("disable-bias-linear"));
        let is_rotary = self.text("position-embedding-type") == "rope";
        let is_rms = self.text("normalization") == "RMSNorm";
        let tied = !self.is("untie-embeddings-and-output-weights");
        let mut text = String::new();
        let is_gpt = !is_gated && has_bias && !is_rotary && !is_rms;
        if is_gpt {
            let positions = self.text("max-position-embeddings");
            let positions = if positions.is_empty() { self.text("seq") } else { positions };
            let dropout = if self.text("hidden-dropout") == "0.0" { 0.0 } else { 0.1 };
            writeln!(text, "[model.gpt]\nsequence = {positions}\ndropout = {dropout:?}")?;
        } else {
            // Stages after the first have no positions, and gapless's Llama has no dropout.
            let norm = if is_rms { "rms" } else { "layer" };
            let [kv_heads, head_size] = [("kv_heads", heads), ("kv-channels", width / heads)]
                .map(|(key, usual)| self.text(key).parse().unwrap_or(usual));
            let activation = if is_gated { "silu" } else { "gelu" };
            writeln!(
                text,
                "[model.llama]\nkv_heads = {kv_heads}\nhead_size = {head_size}\nqkv_bias = {has_bias}\noutput_bias = {has_bias}\n\
                 mlp_bias = {has_bias}\nactivation = '{activation}'\ntraits = {{ norm = '{norm}', ungated = {} }}",
                !is_gated
            )?;
        }
        writeln!(
            text,
            "vocabulary = {vocabulary}\nlayers = {layers}\nheads = {heads}\nwidth = {width}\nhidden = {hidden}\ntied = {tied}"
        )?;
        let ranks = data * context;
        writeln!(
            text,
            "[step]\nbatch = {}\nmicro_batches = {micro_batches}\nsequence = {}\nprecision = 'bf16'\nsequence_parallel = {}\n\
             [mesh]\ndata = {ranks}\npipeline = {pipeline}\ntensor = {tensor}",
            micro_batch * micro_batches * ranks,
            self.number("seq") / context,
            self.text("sp") == "yes" && tensor > 1
        )?;
        // Megatron counts the embedding and the loss as a layer each if it is told to. The run that does has two stages of one
        // layer on each rank.
        let [embedding, loss] =
            ["embedding", "loss"].map(|end| self.is(&format!("account-for-{end}-in-pipeline-split")));
        let per_stage = self.text("vpp").split(' ').next().and_then(|word| word.parse::<usize>().ok());
        let chunks = match per_stage {
            Some(_) if embedding && loss => (layers + 2) / pipeline,
            Some(per_stage) if pipeline > 1 => layers / pipeline / per_stage,
            _ => 1,
        };
        let schedule = if chunks > 1 { "interleaved" } else { "1f1b" };
        let block = if is_gpt { "h" } else { "model.layers" };
        let ends =
            ["first", "last"].map(|end| self.text(&format!("decoder-{end}-pipeline-num-layers")).parse::<usize>());
        let cut = match ends {
            [Ok(first), Ok(last)] => {
                let middle = (layers - first - last) / (pipeline - 2);
                let starts = (0..pipeline - 1).map(|stage| format!("'{block}.{}'", first + stage * middle));
                format!("[{}]", starts.collect::<Vec<_>>().join(", "))
            }
            _ if embedding && loss => {
                let starts = (0..layers).map(|layer| format!("'{block}.{layer}'")).chain(["'ln_f'".to_owned()]);
                format!("[{}]", starts.collect::<Vec<_>>().join(", "))
            }
            _ => "'equal'".to_owned(),
        };
        writeln!(text, "[pipeline]\nschedule = '{schedule}'\nchunks = {chunks}\ncut = {cut}")?;
        let recompute = if self.text("recompute").starts_with("full") { "layers" } else { "none" };
        let is_local = self.text("transformer-impl") == "local";
        let is_fp16 = self.text("dtype") == "fp16";
        let instances = self.number("num-distributed-optimizer-instances");
        let optimizer_ranks = if self.text("fsdp_zero").starts_with('1') { ranks / instances } else { 1 };
        let profile = match self.name.rsplit_once("dgx_").map_or("", |(_, machine)| machine) {
            "h100)" => "h100",
            "gb200)" => "b200",
            _ => "a100-80",
        };
        writeln!(
            text,
            "[memory]\nrecompute = '{recompute}'\n[estimate]\nlowering = 'megatron'\nprofile = '{profile}'\nrank = '{}'\n\
             [estimate.megatron]\nfp16 = {is_fp16}\noptimizer_ranks = {optimizer_ranks}\nunfused_attention = {}\nring_attention = {}\n\
             local_layers = {is_local}\ndeterministic = {}",
            pipeline - 1,
            is_local || self.text("attention-backend") == "unfused",
            context > 1,
            self.is("deterministic-mode")
        )?;
        Ok(RunConfig::parse(&text, &[])?)
    }

    /// Returns the bytes of the last rank, which is the one that Megatron's log shows.
    fn bytes(&self) -> Result<EagerBytes> {
        let step = Step::new(&self.run()?)?;
        Ok(step.eager_bytes(&step.record()?, step.ranks[0])?)
    }

    /// Returns the error of the peak in percent.
    fn error(&self, bytes: EagerBytes) -> f64 {
        100.0 * (bytes.peak as f64 / self.peak as f64 - 1.0)
    }

    fn line(&self, bytes: EagerBytes) -> String {
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        let mesh = ["tp", "pp", "cp", "dp"].map(|key| self.number(key).to_string()).join(" × ");
        format!(
            "| `{}` | {mesh} | {} | {} | {:.1} | {} | {} | {:+.1} % |",
            self.name,
            mib(bytes.states),
            mib(self.allocated),
            (self.allocated as f64 - bytes.states as f64) / f64::from(1 << 20),
            mib(bytes.peak),
            mib(self.peak),
            self.error(bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the measured memory that the states may leave unexplained: workspaces, messages, the batch.
    const UNEXPLAINED: u64 = 128 << 20;

    /// Cases whose measured bytes after a step exceed their states by more, by the beginning of the name and the machine.
    const EXCEPTIONS: [(&str, &str); 10] = [
        ("gpt3_mcore_reruns_resume_check_grads ", "h100"),
        ("gpt3_mcore_te_tp2_pp2_resume_torch_dist_defer_embedding_wgrad_compute ", "gb200"),
        ("gpt3_mcore_te_tp2_pp2_resume_torch_dist_defer_embedding_wgrad_compute ", "h100"),
        ("gpt3_mcore_te_tp1_pp4_resume_torch_dist_persistent_disable_bias_linear_1node ", "gb200"),
        ("gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather ", ""),
        ("gpt3_mcore_tp1_pp2_resume_torch_dist ", "a100"),
        ("gpt3_mcore_tp1_pp2_resume_torch_dist ", "gb200"),
        ("gpt3_mcore_tp1_pp4 ", "a100"),
        ("gpt3_mcore_tp1_pp4 ", "gb200"),
        ("gpt3_mcore_tp1_pp4 ", "h100"),
    ];

    /// States are at most 128 MiB below the measured bytes and never above them, peaks are near the measured ones, and the
    /// page has the lines that this program prints.
    #[test]
    fn states_and_peaks_are_those_of_the_page() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/published_bytes.md")).unwrap();
        assert!(page.contains(HEAD));
        let Some(facts) = gapless_testing::next_to_repository("mesh/facts.csv.gz") else { return };
        let all = cases(&facts).unwrap();
        let is_slow = std::env::var_os("GAPLESS_SLOW_TESTS").is_some();
        let mut errors = Vec::new();
        for case in all.iter().step_by(if is_slow { 1 } else { 12 }) {
            let bytes = case.bytes().unwrap();
            let line = case.line(bytes);
            gapless_testing::assert_on_page("docs/published_bytes.md", &line);
            let rest = case.allocated.checked_sub(bytes.states);
            let is_explained = rest.is_some_and(|rest| rest <= UNEXPLAINED);
            let is_exception =
                |(start, machine): &(&str, &str)| case.name.starts_with(start) && case.name.contains(machine);
            assert_eq!(is_explained, !EXCEPTIONS.iter().any(is_exception), "{line}");
            errors.push(case.error(bytes));
        }
        let errors = Errors::new(errors);
        if is_slow {
            assert!(page.contains(&errors.to_string()), "the page has another summary than {errors}");
            assert!(errors.median <= 3.0 && errors.nine_tenths <= 8.0, "{errors}");
        }
    }

    #[test]
    fn fields_may_be_quoted() {
        assert_eq!(csv::fields("a,\"b, c\",,d"), ["a", "b, c", "", "d"]);
    }
}
