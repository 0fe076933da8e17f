//! Compares the generators with tables from elsewhere: a few written out here, and the reference tables of PyTorch and
//! of the zero-bubble authors.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use gapless_parallel::{
    Cell, CommunicationKind, Costs, Schedule, SearchedZb, SearchedZbv, Sends, Shape, Waits, by_name, check,
    communicate, fetch_weights, merge_backwards, read_table, reduce_gradients, write_table,
};
use gapless_testing::{open, table_name};

fn table(schedule: &dyn Schedule, shape: &Shape) -> String {
    write_table(&schedule.table(shape).expect("the shape is a legal one"))
}

#[test]
fn small_tables() {
    for (name, (ranks, chunks, micro_batches), expected) in [
        ("gpipe", (2, 1, 2), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"),
        ("1f1b", (3, 1, 3), "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2B0,2F1,2B1,2F2,2B2\n"),
        ("interleaved", (2, 2, 2), "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"),
        ("looped-bfs", (2, 2, 2), "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\n"),
        ("zb-h1", (2, 1, 3), "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"),
        (
            "interleaved-zb",
            (2, 2, 2),
            "0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n1F0,1F1,3F0,3I0,3F1,3I1,3W0,1I0,3W1,1I1,1W0,1W1\n",
        ),
        ("zb-h2", (2, 1, 3), "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n"),
        (
            "zbv",
            (2, 2, 2),
            "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1\n",
        ),
        (
            "v-min",
            (2, 2, 2),
            "0F0,0F1,3F0,3I0,3W0,0I0,0W0,3F1,3I1,3W1,0I1,0W1\n1F0,2F0,2I0,1I0,1F1,2F1,2W0,1W0,2I1,1I1,2W1,1W1\n",
        ),
        (
            "dualpipev",
            (2, 2, 4),
            "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,\
             0I2,0W2,0I3,0W3\n\
             1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,\
             2I3,1I3,2W3,1W3\n",
        ),
        (
            "v-1f1b",
            (2, 2, 4),
            "0F0,0F1,0F2,3F0,3B0,3F1,3B1,0F3,0B0,3F2,3B2,0B1,3F3,3B3,0B2,0B3\n\
             1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2B1,1B1,1F3,2F3,2B2,1B2,2B3,1B3\n",
        ),
        ("zb-searched", (2, 1, 3), "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"),
        (
            "zbv-searched",
            (2, 2, 2),
            "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n",
        ),
        ("layered-accumulation", (1, 2, 2), "0F0,0F1,1F0,1F1,1B1,1B0,0B1,0B0\n"),
    ] {
        let shape = Shape { ranks, chunks, micro_batches };
        assert_eq!(table(&*by_name(name).unwrap(), &shape), expected, "{name}");
    }
}

/// Families of reference tables, each with this crate's name for the schedule.
const FAMILIES: [(&str, &str); 16] = [
    ("generated_pytorch2.15/gpipe", "gpipe"),
    ("generated_pytorch2.15/interleaved1f1b", "interleaved"),
    ("generated_pytorch2.15/interleavedzb", "interleaved-zb"),
    ("generated_pytorch2.15/loopedbfs", "looped-bfs"),
    ("generated_pytorch2.15/zbv", "zbv"),
    ("generated_pytorch2.15/dualpipev", "dualpipev"),
    ("generated_zerobubble/1f1b", "1f1b"),
    ("generated_zerobubble/vpp2", "interleaved"),
    ("generated_zerobubble/v1f1b", "v-1f1b"),
    ("generated_zerobubble/zb1p", "zb-searched"),
    ("generated_zerobubble/zb2p", "zb-searched"),
    ("generated_zerobubble/zbv", "zbv-searched"),
    ("generated_zerobubble/zbvhalf", "v-half"),
    ("generated_zerobubble/zbvmin", "v-min"),
    ("pytorch/dualpipev", "dualpipev"),
    ("pytorch/zb1p", "interleaved-zb"),
];

/// Returns the schedule that generates this table: a rule, or a search for the costs in the table's name.
fn generator(name: &str, schedule: &str, ranks: u32) -> Box<dyn Schedule> {
    match schedule {
        "zb-searched" => {
            let peak = if is_of(name, "generated_zerobubble/zb2p") { 2 * ranks } else { ranks };
            Box::new(SearchedZb { costs: vec![costs(name)], peak: Some(peak), ..SearchedZb::default() })
        }
        "zbv-searched" => Box::new(SearchedZbv { costs: vec![costs(name)], ..SearchedZbv::default() }),
        _ => by_name(schedule).unwrap(),
    }
}

/// Parses the ticks of F, I, W and a transfer at the end of a name: `f1000b1100w700c20`.
fn costs(name: &str) -> Costs {
    let ticks = name.rsplit('_').next().unwrap().split(['f', 'b', 'w', 'c']).skip(1);
    let ticks: Vec<u64> = ticks.map(|ticks| ticks.parse().unwrap()).collect();
    let &[forward, backward_input, backward_weight, transfer] = &ticks[..] else { panic!("{name} has no costs") };
    let overlapped = forward + backward_input + backward_weight;
    Costs { forward, backward_input, backward_weight, overlapped, transfer }
}

#[test]
fn reference_tables() {
    let folder = gapless_testing::evidence("vectors");
    let mut matched: BTreeMap<(&str, bool), u32> = BTreeMap::new();
    let mut wrong = Vec::new();
    for path in tables(&folder) {
        let family = path.parent().and_then(|parent| parent.file_name()).unwrap().display();
        let name = format!("{family}/{}", table_name(&path).unwrap());
        let Some((family, schedule)) = FAMILIES.iter().find(|(family, _)| is_of(&name, family)) else {
            wrong.push(format!("{name}: of no family that is known"));
            continue;
        };
        let text = std::io::read_to_string(open(&path).unwrap()).unwrap();
        let reference = read_table(&text).unwrap();
        let computes: Vec<Vec<Cell>> = reference.iter().map(|row| only(row, is_computed)).collect();
        let shape = shape_of(&computes);
        let ours = generator(&name, schedule, shape.ranks).table(&shape).expect("the shape is a legal one");
        let communicates = name.ends_with("_comms");
        let (ours, reference) = if communicates {
            // Tables with communication have no idle slots, so they are written exactly as they were read.
            assert!(write_table(&reference).lines().eq(text.lines()), "{name} is not written as it was read");
            let violations = check(&reference, stages(&reference), micro_batches(&reference), Sends::Blocking);
            assert!(violations.is_empty(), "{name}: {violations:?}");
            (lowered_like(&reference, &ours), reference)
        } else {
            (ours, computes)
        };
        let (ours, reference) = (write_table(&ours), write_table(&reference));
        if ours == reference {
            *matched.entry((*family, communicates)).or_insert(0) += 1;
        } else {
            wrong.push(format!("{name}:\n{ours}instead of\n{reference}"));
        }
    }
    println!("reference tables matched, by (family, with communication): {matched:?}");
    assert!(wrong.is_empty(), "{} tables differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(matched.len() >= 20, "too few families of tables: {matched:?}");
}

/// Returns every table under `folder`, sorted.
fn tables(folder: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    };
    let folders = entries(folder).into_iter().filter(|path| path.is_dir());
    let files = folders.flat_map(|folder| entries(&folder));
    files.filter(|path| table_name(path).is_some()).collect()
}

fn is_of(name: &str, family: &str) -> bool {
    name.strip_prefix(family).is_some_and(|rest| rest.starts_with('_'))
}

/// Lowers a table of this crate like the reference. PyTorch's runtime fetches weights for three stages, reduces
/// gradients and waits for its sends. PyTorch's older test data does none of that, and merges adjacent input and weight
/// gradients.
fn lowered_like(reference: &[Vec<Cell>], ours: &[Vec<Cell>]) -> Vec<Vec<Cell>> {
    let three = NonZeroUsize::new(3).unwrap();
    if reference.iter().flatten().any(|cell| is(cell, &[CommunicationKind::Unshard])) {
        return communicate(&fetch_weights(&reduce_gradients(ours), three), Waits::Late).unwrap();
    }
    let waits = [CommunicationKind::WaitSendForward, CommunicationKind::WaitSendBackward];
    let table = communicate(&merge_backwards(ours), Waits::Late).unwrap();
    table.iter().map(|row| only(row, |cell| !is(cell, &waits))).collect()
}

fn only(row: &[Cell], keep: impl Fn(&Cell) -> bool) -> Vec<Cell> {
    row.iter().copied().filter(keep).collect()
}

fn is(cell: &Cell, kinds: &[CommunicationKind]) -> bool {
    matches!(cell, Cell::Communicate(communication) if kinds.contains(&communication.kind))
}

fn is_computed(cell: &Cell) -> bool {
    matches!(cell, Cell::One(_) | Cell::Overlap(..))
}

/// Returns the shape of a reference table.
fn shape_of(table: &[Vec<Cell>]) -> Shape {
    let ranks = table.len() as u32;
    Shape { ranks, chunks: stages(table) / ranks, micro_batches: micro_batches(table) }
}

fn stages(table: &[Vec<Cell>]) -> u32 {
    table.iter().flatten().flat_map(Cell::actions).map(|action| action.stage.0 + 1).max().expect("a table has actions")
}

fn micro_batches(table: &[Vec<Cell>]) -> u32 {
    let actions = table.iter().flatten().flat_map(Cell::actions);
    actions.map(|action| action.micro_batch.0 + 1).max().expect("a table has actions")
}
