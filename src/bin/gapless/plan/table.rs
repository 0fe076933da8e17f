//! `gapless plan FILE`: places a table of buffers.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use gapless_alloc::csv::{self, Table};
use gapless_alloc::draw::MemoryMap;
use gapless_alloc::{Fit, Label, Options, Role, Solution, check, explain, plan};

use super::{Arguments, draw};

/// Places the table in a file.
pub fn place(arguments: &Arguments, file: &Path) -> anyhow::Result<Fit> {
    let input = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let table = csv::read(BufReader::new(input)).with_context(|| format!("cannot read {}", file.display()))?;
    let options = Options { capacity: arguments.capacity, deadline: arguments.deadline, ..Options::default() };
    let start = Instant::now();
    let solution = plan(&table.problem, &options);
    let plan_ms = start.elapsed().as_secs_f64() * 1e3;
    if solution.offsets.len() != table.problem.len() {
        bail!("no plan was found below 2^64 bytes; sizes and alignments together leave none, or it is well hidden");
    }
    if let Err(violations) = check(&table.problem, &solution.offsets, None) {
        panic!("the planner made a plan that the checker rejects: {violations:?}");
    }
    if let Some(out) = &arguments.out {
        write(out, &table, &solution).with_context(|| format!("cannot write {}", out.display()))?;
    }
    if let Some(path) = &arguments.draw {
        let labels: Vec<Label> = table.ids.iter().map(|id| label(id)).collect();
        let title = path.file_stem().map_or_else(|| "plan".into(), |stem| stem.to_string_lossy());
        draw(path, &MemoryMap::new(&title, &table.problem, &solution.offsets, &labels)?)?;
    }
    report(arguments, &table, &solution, plan_ms);
    Ok(solution.fit)
}

/// A table says nothing of what its buffers are for.
fn label(id: &str) -> Label {
    Label { tensor: id.to_owned(), op: String::new(), layer: String::new(), role: Role::Activation }
}

fn report(arguments: &Arguments, table: &Table, solution: &Solution, plan_ms: f64) {
    let (buffers, proof, gap) = (table.problem.len(), solution.proof.name(), solution.gap());
    if arguments.json {
        let json = serde_json::json!({
            "buffers": buffers,
            "lower_bound": solution.lower_bound,
            "height": solution.height,
            "gap": gap,
            "proof": proof,
            "plan_ms": plan_ms,
        });
        println!("{json}");
    } else {
        println!(
            "{buffers} buffers in {} bytes, {gap:.4} × the most alive at once ({})",
            solution.height, solution.lower_bound
        );
        println!("proof: {proof}; planned in {plan_ms:.1} ms");
    }
    let Some(capacity) = arguments.capacity else { return };
    let verdict = match solution.fit {
        Fit::Fits => return,
        Fit::Impossible => "does not fit: no plan can",
        Fit::Unknown => "does not fit: this plan doesn't, whether another would is not known",
    };
    eprintln!("{verdict}");
    // The table names buffers by its own ids, and says nothing of what they are for.
    if let Some(explanation) = explain(&table.problem, &[], solution, capacity) {
        eprint!("{}", explanation.named(|id| table.ids[id.index()].clone()));
    }
}

fn write(path: &Path, table: &Table, solution: &Solution) -> anyhow::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    csv::write(&mut out, &table.ids, &table.problem, Some(&solution.offsets))?;
    Ok(out.flush()?)
}
