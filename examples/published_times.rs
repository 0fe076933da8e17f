//! The throughputs that Megatron-Bridge and torchtitan published, beside the estimates for the same steps.
//!
//! `cargo run --release --example published_times -- facts.csv.gz` prints the tables of docs/published_times.md. The file
//! has a line for each measured figure, with the configuration of the run in its other columns.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;
use gapless::run::RunConfig;
use gapless::step::Step;

mod csv;
mod facts;

use facts::{Columns, preset, text};

#[derive(Parser)]
#[command(about = "Published throughputs, and ours")]
struct Args {
    /// The measured figures (CSV, gzipped)
    file: PathBuf,
    /// Only tables whose name contains this
    #[arg(long, default_value = "")]
    table: String,
}

/// A published run.
struct Case {
    table: String,
    columns: Columns,
    /// Tokens per second and GPU.
    measured: f64,
}

const HEAD: &str = "\
| model | GPUs | type | tensor × context × pipeline × chunks × expert | copies | tokens/s per GPU, measured | estimate | estimate ÷ measured |
|---|---|---|---|---|---:|---:|---:|";

fn main() -> Result<()> {
    let args = Args::parse();
    let cases = cases(&args.file)?;
    let mut tables: Vec<&str> = Vec::new();
    for Case { table, .. } in &cases {
        if !tables.contains(&&**table) && table.contains(&args.table) {
            tables.push(table);
        }
    }
    let mut known = HashMap::new();
    for table in tables {
        println!("## {table}\n\n{HEAD}");
        let mut pairs = Vec::new();
        for case in cases.iter().filter(|case| case.table == table) {
            match case.estimate(&mut known) {
                Ok(estimate) => {
                    println!("{}", case.line(estimate));
                    pairs.push((case.measured, estimate));
                }
                Err(why) => eprintln!("{} is left out: {why:#}", case.line(0.0)),
            }
        }
        println!("\n{}\n", summary(&pairs));
    }
    Ok(())
}

/// Reads the runs of models that have presets.
fn cases(path: &Path) -> Result<Vec<Case>> {
    let case = |columns: Columns| {
        let (source, section) = (text(&columns, "source"), text(&columns, "table_or_section"));
        let table = match section.split_once(" NeMo Container, Pre-Training") {
            Some((release, _)) => format!("Megatron-Bridge {release}"),
            None if source.contains("torchtitan b5bcd76c") => "torchtitan".to_owned(),
            None => return None,
        };
        let is_throughput = text(&columns, "quantity") == "throughput" && text(&columns, "unit") == "tokens/s/GPU";
        let measured = text(&columns, "value").parse().ok().filter(|_| is_throughput)?;
        preset(text(&columns, "model"))?;
        Some(Case { table, columns, measured })
    };
    Ok(facts::read(path)?.into_iter().filter_map(case).collect())
}

impl Case {
    fn number(&self, key: &str) -> usize {
        facts::number(&self.columns, key)
    }

    /// The type in which products of layers are computed.
    fn products(&self) -> &str {
        match (text(&self.columns, "dtype"), text(&self.columns, "note")) {
            (_, note) if note.contains("float8") => "FP8",
            (dtype, _) if dtype.starts_with("bf16") => "BF16",
            (dtype, _) => dtype,
        }
    }

    /// The ranks that share the batch: data, shard and expert ranks.
    fn copies(&self) -> usize {
        self.number("gpus") / (self.number("tp") * self.number("cp") * self.number("pp")).max(1)
    }

    /// Returns the run of this case.
    fn run(&self) -> Result<RunConfig> {
        let [tensor, context, pipeline, experts] = ["tp", "cp", "pp", "ep"].map(|key| self.number(key));
        let copies = self.copies();
        let micro_batch = self.number("micro_batch");
        let batch = text(&self.columns, "global_batch").parse().unwrap_or(micro_batch * copies);
        // Experts are divided along the copies, and over tensor ranks too if these are too few.
        let (expert, fold) = if experts > copies { (experts / tensor, "'tensor'") } else { (experts, "") };
        let zero = text(&self.columns, "fsdp_zero");
        let is_sharded = zero.contains("FSDP");
        let others = copies / expert.max(1);
        let (data, shard) = if is_sharded { (1, others) } else { (others, 1) };
        // torchtitan's local batch is that of all micro-batches of a pipeline.
        let micro_batches = match pipeline > 1 && is_sharded {
            true => micro_batch.max(1),
            false => (batch / (micro_batch * copies)).max(1),
        };
        let chunks = match text(&self.columns, "vpp") {
            ">1" => 2,
            vpp => vpp.parse().unwrap_or(1),
        };
        let chunks = if pipeline > 1 { chunks } else { 1 };
        let schedule = if chunks > 1 { "interleaved" } else { "1f1b" };
        let recompute = match text(&self.columns, "recompute") {
            "full" => "layers",
            "selective op" => "ops:rms_norm,swiglu",
            _ => "none",
        };
        let machine = text(&self.columns, "note");
        let is_blackwell = machine.contains("B200") || machine.contains("B300");
        let profile = if is_blackwell { "b200" } else { "h100" };
        // Dense peaks of tensor cores in TFLOP/s, from NVIDIA's datasheets.
        let tflops = match (is_blackwell, machine.contains("B300"), self.products()) {
            (false, _, "FP8") => 1979.0,
            (false, _, _) => 989.0,
            (true, true, "NVFP4") => 15_000.0,
            (true, false, "NVFP4") => 10_000.0,
            (true, _, "FP8" | "MXFP8") => 5_000.0,
            (true, _, _) => 2_500.0,
        };
        let mut run =
            format!("model = '{}'\ndevice = 'cuda'\n", preset(text(&self.columns, "model")).context("model")?);
        writeln!(
            run,
            "[step]\nbatch = {batch}\nmicro_batches = {micro_batches}\nsequence = {}\nprecision = 'bf16'\nsequence_parallel = {}\n\
             zero_stage = {}\n[mesh]\ndata = {data}\nshard = {shard}\npipeline = {pipeline}\nexpert = {expert}\ncontext = {context}\n\
             tensor = {tensor}\nfold = [{fold}]\n[pipeline]\nschedule = '{schedule}'\nchunks = {chunks}\n[memory]\n\
             recompute = '{recompute}'\n[estimate]\nprofile = '{profile}'\ntflops = {tflops:?}",
            self.number("seq"),
            tensor > 1,
            if pipeline > 1 { 2 } else { 3 },
        )?;
        Ok(RunConfig::parse(&run, &[])?)
    }

    /// Returns the estimated tokens per second and GPU. `known` has the estimates so far, by run.
    fn estimate(&self, known: &mut HashMap<String, f64>) -> Result<f64> {
        let run = self.run()?;
        let mut step = Step::new(&run)?;
        // The GPUs of a rack of GB200 or GB300 are connected by NVLink.
        let machine = text(&self.columns, "note");
        step.device.node = if machine.contains("GB") { 64 } else { 8 };
        let key = format!("{} {:?}", step.graph_key(), (&run.mesh, &run.pipeline, &run.memory.recompute, &step.device));
        if let Some(known) = known.get(&key) {
            return Ok(*known);
        }
        let key_of_sketch = step.sketch_key()?.context("a step without a budget has a sketch")?;
        let timing = step.timing_by(&step.sketch(&step.record()?, &key_of_sketch)?)?;
        let tokens = (step.options.batch * step.options.sequence) as f64;
        let estimate = tokens / (timing.nanoseconds() as f64 / 1e9) / self.number("gpus") as f64;
        known.insert(key, estimate);
        Ok(estimate)
    }

    fn line(&self, estimate: f64) -> String {
        let mesh = ["tp", "cp", "pp", "vpp", "ep"].map(|key| self.number(key).to_string()).join(" × ");
        let note = text(&self.columns, "note");
        format!(
            "| {} | {} {} | {} | {mesh} | {} | {} | {estimate:.0} | {:.2} |",
            text(&self.columns, "model"),
            self.number("gpus"),
            note.split(';').next().unwrap_or_default(),
            self.products(),
            self.copies(),
            self.measured,
            estimate / self.measured
        )
    }
}

/// Returns the correlation of ranks, and the sizes of errors.
fn summary(pairs: &[(f64, f64)]) -> String {
    let (measured, estimated): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let mut errors: Vec<f64> = pairs.iter().map(|(measured, estimate)| 100.0 * (estimate / measured - 1.0)).collect();
    errors.sort_by(f64::total_cmp);
    let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let middle = |values: &[f64]| values.get(values.len() / 2).copied().unwrap_or(0.0);
    format!(
        "{} runs; rank correlation {:.2}; median error {:+.0} %, median size of the error {:.0} %",
        pairs.len(),
        rank_correlation(&measured, &estimated),
        middle(&errors),
        middle(&sizes)
    )
}

/// Spearman's rank correlation, in which equal values share the mean of their ranks.
fn rank_correlation(a: &[f64], b: &[f64]) -> f64 {
    let ranks = |values: &[f64]| -> Vec<f64> {
        let rank = |value: &f64| {
            let below = values.iter().filter(|other| *other < value).count();
            let equal = values.iter().filter(|other| *other == value).count();
            below as f64 + (equal as f64 - 1.0) / 2.0
        };
        values.iter().map(rank).collect()
    };
    let (a, b) = (ranks(a), ranks(b));
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let (mean_a, mean_b) = (mean(&a), mean(&b));
    let product = |a: &[f64], b: &[f64], (mean_a, mean_b): (f64, f64)| -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - mean_a) * (b - mean_b)).sum()
    };
    let norm = (product(&a, &a, (mean_a, mean_a)) * product(&b, &b, (mean_b, mean_b))).sqrt();
    product(&a, &b, (mean_a, mean_b)) / norm.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page has the lines that the program prints, and tables whose order it knows: all of them with
    /// `GAPLESS_SLOW_TESTS=1`, otherwise the first line.
    #[test]
    fn estimates_are_those_of_the_page() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/published_times.md")).unwrap();
        assert!(page.contains(HEAD));
        let Some(facts) = gapless_testing::next_to_repository("mesh/facts.csv.gz") else { return };
        let is_slow = std::env::var_os("GAPLESS_SLOW_TESTS").is_some();
        let (mut tables, mut known) = (HashMap::<String, Vec<(f64, f64)>>::new(), HashMap::new());
        for case in cases(&facts).unwrap().iter().take(if is_slow { usize::MAX } else { 1 }) {
            let estimate = case.estimate(&mut known).unwrap();
            gapless_testing::assert_on_page("docs/published_times.md", &case.line(estimate));
            tables.entry(case.table.clone()).or_default().push((case.measured, estimate));
        }
        for (table, pairs) in tables.iter().filter(|(_, pairs)| pairs.len() > 1) {
            let (measured, estimated): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
            assert!(rank_correlation(&measured, &estimated) >= 0.8, "{table}");
            assert!(page.contains(&summary(pairs)), "{table}");
        }
    }

    #[test]
    fn ranks_are_correlated() {
        for (a, b, expected) in [
            ([1.0, 2.0, 3.0], [10.0, 20.0, 40.0], 1.0),
            ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
            ([1.0, 2.0, 3.0], [1.0, 1.0, 2.0], 3.0_f64.sqrt() / 2.0),
        ] {
            assert!((rank_correlation(&a, &b) - expected).abs() < 1e-12, "{a:?} {b:?}");
        }
    }
}
