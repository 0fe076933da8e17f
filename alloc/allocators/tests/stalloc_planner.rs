//! The model of STAlloc, compared byte for byte with the memory that the planner of STAlloc's authors reserved for the
//! same steps.

use std::collections::BTreeMap;
use std::fs;

use gapless_alloc::csv;
use gapless_alloc::{Buffer, Problem};
use gapless_allocators::{Device, Kind, Report, Request, Requests, StAlloc, replay};
use gapless_testing::prelude::*;
use gapless_testing::{assert_on_page, evidence, not_checked, open, table_name};

#[test]
fn both_algorithms_reserve_what_the_authors_planner_does() {
    let folder = evidence("instances/stalloc");
    let phases = phases();
    let figures = fs::read_to_string(folder.join("authors_planner.csv")).unwrap();
    let paths = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let tables: BTreeMap<String, _> = paths.filter_map(|path| Some((table_name(&path)?.to_owned(), path))).collect();
    let mut wrong = Vec::new();
    // By step, the reserved bytes ÷ live bytes of `group`, of `split-and-fuse`, and of our own strips.
    let mut table: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for line in figures.lines().skip(1) {
        let [name, algorithm, buffers, _, reserved, _] = line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let Some(path) = tables.get(name) else {
            not_checked(format_args!("{name} does not lie beside the project"));
            continue;
        };
        let problem = csv::read(open(path).unwrap()).unwrap().problem;
        assert_eq!(2 * problem.len(), buffers.parse::<usize>().unwrap(), "{name}: two iterations");
        let requests = Requests::new(&problem);
        let phases: &[u64] = if algorithm == "group" { &phases[name] } else { &[] };
        let mut allocator = StAlloc::with(Device::new(1 << 40), &problem, &requests, phases, |_| false);
        let report = replay(&requests, &mut allocator, 3).unwrap();
        assert_eq!(report.statistics.device_allocations, 1, "{name}, {algorithm}: the plan holds");
        println!("{name}, {algorithm}: {} of {reserved}", report.peak_reserved());
        let ratio = |report: &Report| format!("{:.4}", report.peak_reserved() as f64 / requests.peak_live() as f64);
        table.entry(name).or_default().push(ratio(&report));
        // The second of the two.
        if algorithm == "split-and-fuse" {
            let mut strips = Kind::STALLOC_STRIPS.build(1 << 40, &problem, &requests);
            table.entry(name).or_default().push(ratio(&replay(&requests, &mut *strips, 3).unwrap()));
        }
        if report.peak_reserved() != reserved.parse::<u64>().unwrap() {
            wrong.push(format!("{name}, {algorithm}: {}, not {reserved}", report.peak_reserved()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (name, mut ratios) in table {
        ratios.swap(0, 1);
        assert_on_page("docs/allocators.md", &format!("| {name} | {} |", ratios.join(" | ")));
    }
}

fn phases() -> BTreeMap<String, Vec<u64>> {
    let row = |line: &str| {
        let mut cells = line.split(',');
        let name = cells.next().unwrap().to_owned();
        (name, cells.map(|tick| tick.parse().unwrap()).collect())
    };
    include_str!("stalloc_planner/phases.csv").lines().filter(|line| !line.starts_with('#')).map(row).collect()
}

generated! {
    #![cases(64)]

    /// There are only a few sizes, so that classes are large and layers fill up.
    #[test]
    fn split_and_fuse_is_its_twin(
        rows in prop::collection::vec((0..60u64, 1..40u64, prop_oneof![1..3000u64, (1..12u64).prop_map(|n| n * 1024)]), 1..80),
    ) {
        let buffers = rows.into_iter().map(|(start, length, bytes)| Buffer::new(start..start + length, bytes));
        let problem = Problem::new(buffers.collect()).unwrap();
        let requests = Requests::new(&problem);
        let mut allocator = StAlloc::new(Device::new(1 << 30), &problem, &requests);
        let report = replay(&requests, &mut allocator, 3).unwrap();
        prop_assert_eq!(report.peak_reserved(), twin(&requests));
        prop_assert_eq!(report.statistics.device_allocations, 1, "the plan holds");
    }
}

/// First tick, last tick and bytes of a buffer.
type Piece = (usize, usize, u64);

/// A reference implementation of `split-and-fuse`, which keeps a height per tick and offers every buffer to every
/// layer.
fn twin(requests: &Requests) -> u64 {
    let round = |id| requests.bytes(id).div_ceil(512) * 512;
    let persistent: u64 = requests.persistent().iter().map(|&id| round(id)).filter(|&bytes| bytes > 512).sum();
    let is_small = |id| requests.bytes(id) <= 512;
    let mut small = requests.persistent().iter().filter(|&&id| is_small(id)).count();
    let (mut most_small, mut pieces, mut born) = (small, Vec::<Piece>::new(), BTreeMap::new());
    for (tick, request) in (1..).zip(requests.step()) {
        match *request {
            Request::Allocate(id) if is_small(id) => small += 1,
            Request::Free(id) if is_small(id) => small -= 1,
            Request::Allocate(id) => _ = born.insert(id, tick),
            Request::Free(id) => pieces.push((born[&id], tick, round(id))),
        }
        most_small = most_small.max(small);
    }
    let again = requests.step().len();
    pieces.extend_from_within(..);
    let half = pieces.len() / 2;
    pieces[half..].iter_mut().for_each(|piece| (piece.0, piece.1) = (piece.0 + again, piece.1 + again));
    persistent + layers(pieces, 2 * again + 2) + 1024 * most_small as u64
}

fn layers(pieces: Vec<Piece>, ticks: usize) -> u64 {
    let mut classes: BTreeMap<u64, Vec<Piece>> = BTreeMap::new();
    pieces.into_iter().for_each(|piece| classes.entry(piece.2).or_default().push(piece));
    let mut layers: Vec<(u64, Vec<u64>)> = Vec::new();
    for (bytes, class) in classes.into_iter().rev() {
        let class = turns(class).concat();
        let mut order: Vec<usize> = (0..class.len()).collect();
        for _ in 0..6 {
            let mut left = vec![true; order.len()];
            for (size, heights) in &layers {
                let mut heights = heights.clone();
                for (place, &number) in order.iter().enumerate() {
                    left[place] &= !fits(*size, &mut heights, class[number]);
                }
            }
            let front: Vec<usize> = (0..left.len()).filter(|&place| left[place]).collect();
            order = front.iter().copied().chain(order.into_iter().filter(|number| !front.contains(number))).collect();
        }
        for (size, heights) in &mut layers {
            order.retain(|&number| !fits(*size, heights, class[number]));
        }
        for turns in turns(order.iter().map(|&number| class[number]).collect()) {
            let mut heights = vec![0; ticks];
            turns.iter().for_each(|&(start, end, _)| heights[start - 1..end].fill(bytes));
            layers.push((bytes, heights));
        }
    }
    layers.iter().map(|layer| layer.0).sum()
}

fn fits(size: u64, heights: &mut [u64], (start, end, bytes): Piece) -> bool {
    let top = heights[start..=end].iter().max().unwrap() + bytes;
    if top <= size {
        heights[start..=end].fill(top);
    }
    top <= size
}

/// Groups pieces that take turns. In order of birth, each piece joins the group whose last piece died last.
fn turns(mut pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    pieces.sort_unstable();
    let mut all: Vec<Vec<Piece>> = Vec::new();
    for piece in pieces {
        let before = |turns: &&mut Vec<Piece>| turns.last().is_some_and(|last| last.1 <= piece.0);
        match all.iter_mut().filter(before).max_by_key(|turns| turns.last().map(|last| last.1)) {
            Some(turns) => turns.push(piece),
            None => all.push(vec![piece]),
        }
    }
    all
}
