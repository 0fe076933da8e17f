//! The bytes that torchtitan's benchmark reports, beside those of `lowering = "fsdp2"` for the same steps.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use gapless::alloc::{Problem, lower_bound};
use gapless::allocators::{Comparison, Kind, Report, Requests, compare};
use gapless::run::RunConfig;
use gapless::step::Step;

use super::facts::{self, Columns, preset, text};

/// A run of torchtitan.
pub struct Case {
    columns: Columns,
    /// Bytes that PyTorch's allocator reserved on the rank with most, in GiB.
    pub measured: f64,
}

/// Our bytes in GiB.
#[derive(Clone, Copy)]
pub struct Bytes {
    pub allocated: f64,
    pub reserved: f64,
}

pub const HEAD: &str = "\
| table | model | tokens × batch | tensor × context × pipeline × shard | variant | allocated, GiB | reserved, GiB | measured, GiB | error |
|---|---|---|---|---|---:|---:|---:|---:|";

/// Reads the runs of tables 1 to 6.
pub fn cases(path: &Path) -> Result<Vec<Case>> {
    let is_peak = |columns: &Columns| {
        text(columns, "source").starts_with("pytorch/torchtitan")
            && text(columns, "quantity").starts_with("peak memory (")
    };
    let case = |columns: Columns| Ok(Case { measured: text(&columns, "value").parse()?, columns });
    facts::read(path)?.into_iter().filter(is_peak).map(case).collect()
}

impl Case {
    fn number(&self, key: &str) -> usize {
        facts::number(&self.columns, key)
    }

    fn run(&self) -> Result<RunConfig> {
        let [tensor, context, pipeline, data] = ["tp", "cp", "pp", "dp"].map(|key| self.number(key));
        let model = text(&self.columns, "model");
        let model = preset(model).with_context(|| format!("no preset for {model}"))?;
        let note = text(&self.columns, "note");
        // A pipeline has as many micro-batches as stages, unless it is told otherwise.
        let (chunks, schedule) = if note.contains("interleaved") { (2, "interleaved") } else { (1, "1f1b") };
        let micro_batches = if pipeline > 1 { pipeline * chunks } else { 1 };
        let shard = data * context;
        let selective = text(&self.columns, "recompute") == "selective op";
        let mut run = String::new();
        writeln!(
            run,
            "model = '{model}'\n[step]\nbatch = {}\nmicro_batches = {micro_batches}\nsequence = {}\nprecision = 'bf16'\n\
             sequence_parallel = {}\nzero_stage = {}\n[mesh]\nshard = {shard}\ntensor = {tensor}\npipeline = {pipeline}\n\
             [pipeline]\nschedule = '{schedule}'\nchunks = {chunks}\ncut = 'equal'\n[memory]\nrecompute = 'layers'\n[estimate]\n\
             lowering = 'fsdp2'\nprofile = 'h100'\n[estimate.fsdp2]\nselective = {selective}\ncompiled = {}\nasync_tensor = {}",
            self.number("micro_batch") * shard,
            self.number("seq") / context,
            tensor > 1,
            if pipeline > 1 { 2 } else { 3 },
            note.contains("compile"),
            note.contains("async TP")
        )?;
        Ok(RunConfig::parse(&run, &[])?)
    }

    /// Returns the bytes of the pipeline rank with most.
    pub fn bytes(&self) -> Result<Bytes> {
        let step = Step::new(&self.run()?)?;
        let graph = step.record()?;
        let mut most = Bytes { allocated: 0.0, reserved: 0.0 };
        for rank in 0..step.options.mesh.pipeline {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let reserved = |table: &Problem| {
                let kinds = vec![Kind::PYTORCH];
                let comparison = Comparison { kinds, capacity: Some(u64::MAX), iterations: 3, ..Comparison::default() };
                let compared = compare(table, &Requests::new(table), &comparison);
                let outcome = compared.allocators.first().context("one allocator")?.outcome.as_ref();
                outcome.map(Report::peak_reserved).map_err(|why| anyhow::anyhow!("{why}"))
            };
            let [own, beside] = step.eager_streams(&graph, rank)?;
            let reserved = gib(reserved(&own)? + reserved(&beside)?);
            most.allocated = most.allocated.max(gib(lower_bound(&step.eager(&graph, rank)?)));
            most.reserved = most.reserved.max(reserved);
        }
        Ok(most)
    }

    /// Returns the error of the reserved bytes in percent.
    pub fn error(&self, bytes: Bytes) -> f64 {
        100.0 * (bytes.reserved / self.measured - 1.0)
    }

    pub fn line(&self, bytes: Bytes) -> String {
        let mesh = ["tp", "cp", "pp"].map(|key| self.number(key).to_string()).join(" × ");
        let variant = text(&self.columns, "note").split_once("allocator; ").map_or("", |(_, variant)| variant);
        format!(
            "| {} | {} | {} × {} | {mesh} × {} | {} | {:.1} | {:.1} | {:.1} | {:+.1} % |",
            text(&self.columns, "table_or_section").trim_start_matches("Table "),
            text(&self.columns, "model"),
            self.number("seq"),
            self.number("micro_batch"),
            self.number("dp") * self.number("cp"),
            variant.replace("; FSDP shards over dp*cp", ""),
            bytes.allocated,
            bytes.reserved,
            self.measured,
            self.error(bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page has the lines that the program prints: all of them with `GAPLESS_SLOW_TESTS=1`, otherwise the first.
    #[test]
    fn reserved_bytes_are_those_of_the_page() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/published_bytes.md")).unwrap();
        assert!(page.contains(HEAD));
        let Some(facts) = gapless_testing::next_to_repository("mesh/facts.csv.gz") else { return };
        let is_slow = std::env::var_os("GAPLESS_SLOW_TESTS").is_some();
        let mut errors = Vec::new();
        for case in cases(&facts).unwrap().iter().take(if is_slow { usize::MAX } else { 1 }) {
            let bytes = case.bytes().unwrap();
            gapless_testing::assert_on_page("docs/published_bytes.md", &case.line(bytes));
            errors.push(case.error(bytes).abs());
        }
        errors.sort_by(f64::total_cmp);
        assert!(errors[errors.len() / 2] <= 5.0, "{errors:?}");
    }
}
