//! The report of a sweep as one HTML page. Style, script and data are inside the page, and the script draws the plots
//! as SVG.
//!
//! The page's data contains the table of each schedule once, and the times per stage of each row, but no timelines. The
//! script computes timelines from the tables and times, in the same way as the simulator of `parallel`.

use std::collections::BTreeMap;

use gapless_alloc::Role;
use gapless_alloc::draw::escape;
use gapless_parallel::{Cell, Shape};
use serde::Serialize;

use super::row::{Figures, plain};
use super::summary::{self, Column, Fragmentation, Gain, Throughput};
use super::{Configuration, Row, Status, Sweep};
use crate::page;
use crate::run::{NAMES, key_of};
use crate::step::{Origin, Step};
use crate::{Recompute, StepOptions};

/// The JSON in the page's data element.
#[derive(Serialize)]
struct Page<'a> {
    #[serde(flatten)]
    origin: Origin,
    /// Digest of the sweep's configurations.
    sweep: String,
    title: &'a str,
    device: &'a str,
    /// Bytes that an arena may take. NCCL's buffers depend on the mesh, so it is the least of all configurations.
    capacity: u64,
    /// True if other configurations may take more than `capacity`.
    is_least_capacity: bool,
    /// True if the allocators of some configurations replay the step of an eager framework.
    is_eager: bool,
    /// Number of rows that a build of another commit computed.
    other_commits: usize,
    varied: &'a [String],
    allocators: Vec<&'static str>,
    /// The roles that the letters of maps stand for.
    roles: Vec<&'static str>,
    /// Index of the bytes of the arena that a step uses, in `allocators`. 0 if these are the whole arena.
    used: usize,
    menus: &'a [String],
    fragmentation: Vec<Fragmentation>,
    /// Keys of the rows whose arena is larger than the lower bound.
    above: Vec<&'a str>,
    gains: Vec<Gain>,
    throughput: &'a [Throughput],
    rows: Vec<PageRow<'a>>,
    /// Table of each schedule, one string of cells per rank, keyed by `schedule ranks chunks micro-batches`. The
    /// schedule is that of [`Schedule::key`](gapless_parallel::Schedule::key), because all tables of one's own have the
    /// same name.
    tables: BTreeMap<String, Vec<String>>,
}

/// A row with figures, in the form that the page's script reads.
#[derive(Serialize)]
struct PageRow<'a> {
    key: &'a str,
    values: Vec<String>,
    menus: &'a [usize],
    /// One letter for each measure that the step takes, or `plain` if it takes none. R is recomputation, V several
    /// chunks per rank, Z data ranks, O offloading, C compression.
    class: String,
    schedule: String,
    table: String,
    micro_batch: usize,
    fits: bool,
    live: u64,
    /// Live bytes at the peak of the tables that were replayed through the allocators.
    allocated: u64,
    /// True if the live bytes are exact; false if only the sure bytes are known.
    exact: bool,
    /// Bytes reserved by the plan, then by each allocator, and then the bytes of the arena that the step uses if these
    /// are fewer. They are in the order of `allocators`. An element is null if the step was not planned, or was not
    /// replayed through the allocator.
    reserved: Vec<Option<u64>>,
    formula: u64,
    megatron: u64,
    ms: f64,
    bubble: f64,
    overhead: f64,
    tokens: f64,
    roles: &'a BTreeMap<String, u64>,
    /// See [`Figures::map`].
    map: &'a [String],
    /// See [`Figures::map_bytes`].
    map_bytes: u64,
    ranks: &'a [u64],
    stages: &'a [[u64; 4]],
    updates: &'a [u64],
    command: String,
}

pub(super) fn page(sweep: &Sweep, rows: &[Row], throughput: &[Throughput]) -> String {
    let columns = summary::columns(sweep, rows);
    let mut tables = BTreeMap::new();
    let mut shown = Vec::new();
    for (configuration, row) in sweep.configurations.iter().zip(rows) {
        let (Ok(step), Some(figures)) = (&configuration.step, &row.figures) else { continue };
        if row.status == Status::Invalid {
            continue;
        }
        let table = table_key(step);
        tables.entry(table.clone()).or_insert_with(|| cells(step));
        shown.push(page_row(sweep, &columns, (configuration, step), row, figures, table));
    }
    let steps = || sweep.configurations.iter().filter_map(|configuration| configuration.step.as_ref().ok());
    let capacities = steps().map(Step::device_bytes);
    let [least, most] = match sweep.options.capacity {
        Some(capacity) => [capacity; 2],
        None => [capacities.clone().min(), capacities.max()].map(Option::unwrap_or_default),
    };
    let page = Page {
        origin: Origin::new(None),
        sweep: sweep.digest(),
        title: &sweep.title,
        device: steps().next().map_or("", |step| &step.device.name),
        capacity: least,
        is_least_capacity: least < most,
        is_eager: sweep.replays_eager(),
        other_commits: summary::of_other_commits(rows),
        varied: &sweep.varied,
        allocators: columns.iter().map(|column| column.name()).collect(),
        used: columns.iter().position(|&column| column == Column::Served).unwrap_or(0),
        roles: Role::ALL.iter().map(|role| role.name()).collect(),
        menus: &sweep.menus,
        fragmentation: summary::fragmentation(sweep, rows),
        above: summary::above_bound(rows).into_iter().map(|row| &*row.key).collect(),
        gains: summary::gains(sweep, throughput),
        throughput,
        rows: shown,
        tables,
    };
    page::Page {
        title: &sweep.title,
        kind: "sweep",
        style: include_str!("assets/report.css"),
        body: &include_str!("assets/report.html").replace("{title}", &escape(&sweep.title)),
        script: concat!(include_str!("assets/simulate.js"), include_str!("assets/report.js")),
        data: &page::json(&page),
        is_served: false,
    }
    .html()
}

fn page_row<'a>(
    sweep: &Sweep,
    columns: &[Column],
    (configuration, step): (&'a Configuration, &'a Step),
    row: &'a Row,
    figures: &'a Figures,
    table: String,
) -> PageRow<'a> {
    PageRow {
        key: &row.key,
        values: sweep.varied.iter().map(|key| row.configuration.get(key).map_or_else(String::new, plain)).collect(),
        menus: &configuration.menus,
        class: class(step),
        schedule: step.options.pipeline.schedule.key(),
        table,
        micro_batch: figures.micro_batch,
        fits: row.status == Status::Fits,
        live: figures.live(),
        allocated: figures.allocated,
        exact: !figures.live_bytes.is_empty(),
        reserved: columns.iter().map(|column| column.bytes(figures)).collect(),
        formula: figures.formula_bytes,
        megatron: figures.megatron_bytes,
        ms: figures.nanoseconds as f64 / 1e6,
        bubble: figures.bubble,
        overhead: figures.overhead,
        tokens: figures.tokens_per_second,
        roles: &figures.roles,
        map: &figures.map,
        map_bytes: figures.map_bytes,
        ranks: &figures.live_bytes,
        stages: &figures.stages,
        updates: &figures.updates,
        command: command(configuration),
    }
}

/// Returns the letters of [`PageRow::class`].
fn class(step: &Step) -> String {
    let StepOptions { memory, pipeline, mesh, .. } = &step.options;
    let letters = [
        ("R", memory.recompute != Recompute::None || memory.budget.is_some()),
        ("V", pipeline.chunks > 1),
        ("Z", mesh.data > 1 || mesh.shard > 1),
        ("O", !memory.offload.is_empty()),
        ("C", !memory.compress.is_empty()),
    ];
    let class: String = letters.into_iter().filter(|(_, is_so)| *is_so).map(|(letter, _)| letter).collect();
    if class.is_empty() { "plain".into() } else { class }
}

fn table_key(step: &Step) -> String {
    let options = &step.options;
    let (schedule, mesh) = (options.pipeline.schedule.key(), options.mesh);
    format!("{schedule} {} {} {}", mesh.pipeline, options.pipeline.chunks, options.micro_batches)
}

/// Each rank's cells, separated by blanks.
fn cells(step: &Step) -> Vec<String> {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let options = &step.options;
    let shape = Shape {
        ranks: number(options.mesh.pipeline),
        chunks: number(options.pipeline.chunks),
        micro_batches: number(options.micro_batches),
    };
    // A step with figures always has a table.
    let table = options.pipeline.schedule.table(&shape).unwrap_or_default();
    let text = |cell: &Cell| match cell {
        Cell::Overlap(first, second) => format!("{first}+{second}"),
        other => other.to_string(),
    };
    table.iter().map(|row| row.iter().map(text).collect::<Vec<_>>().join(" ")).collect()
}

/// Returns the command line that draws the memory map of this configuration.
fn command(configuration: &Configuration) -> String {
    let mut command = "gapless plan".to_owned();
    for (name, value) in configuration.keys.iter().map(|(name, value)| (key_of(name), plain(value))) {
        let quote = if value.contains([' ', '*', '{', ';']) { "'" } else { "" };
        command += &match NAMES.iter().find(|(_, key)| *key == name) {
            Some((flag, _)) => format!(" --{} {quote}{value}{quote}", flag.replace('_', "-")),
            None => format!(" --set {name}={quote}{value}{quote}"),
        };
    }
    command + " --rank all --draw map.html"
}
