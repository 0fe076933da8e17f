//! Bytes over time. Small cases are counted by hand; all others are compared with a slow count.

use std::collections::BTreeSet;

use gapless_parallel::{
    Cell, Costs, Kind, LastReader, Shape, StageBytes, Waits, all, by_name, communicate, read_table, simulate,
};

fn live(table: &str, rank: usize, bytes: &[StageBytes]) -> Vec<(u64, u64)> {
    simulate(&read_table(table).unwrap(), &Costs::default()).unwrap().live_bytes(rank, bytes)
}

#[test]
fn counted_by_hand() {
    // Stage 1 receives 10 bytes, saves 100 for I and 1000 for W, leaves 10000 from I to W, and sends 7 bytes up.
    let stages = [
        StageBytes::default(),
        StageBytes {
            input: 10,
            input_until: LastReader::InputGradient,
            input_gradient: 7,
            weight_reads_gradient: false,
            saved_until_input: 100,
            saved_until_weight: 1000,
            kept_by_input: 10_000,
        },
    ];
    let split = "0F0,0I0,0W0\n1F0,1I0,1W0\n";
    assert_eq!(live(split, 1, &stages), [(1, 1110), (2, 11_117), (3, 11_000), (4, 0)]);
    // Rank 0 holds the output until the send. It holds the gradient only during the action that uses the gradient.
    assert_eq!(live(split, 0, &stages), [(0, 10), (1, 0), (3, 7), (4, 0)]);
    let whole = "0F0,0B0\n1F0,1B0\n";
    assert_eq!(live(whole, 1, &stages), [(1, 1110), (2, 1117), (4, 0)]);
    // Receives are posted earlier, and sends are waited for later.
    let lowered = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1\n\
                   1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n";
    assert_eq!(
        live(lowered, 0, &stages),
        [(0, 10), (1, 20), (2, 27), (6, 20), (6, 10), (6, 17), (9, 10), (9, 0)],
        "the second receive is posted at once"
    );
    assert_eq!(
        live(lowered, 1, &stages),
        [(0, 10), (0, 20), (1, 1120), (2, 1127), (4, 17), (4, 1117), (5, 1124), (7, 14), (7, 7), (7, 0)]
    );
    // Stages of one rank pass values on without a copy: stage 1's input is born as stage 0's output.
    let alone = "0F0,1F0,1I0,1W0,0I0,0W0\n";
    assert_eq!(live(alone, 0, &stages), [(0, 10), (1, 1110), (2, 11_117), (3, 11_007), (4, 7), (5, 0)]);
}

/// Messages of one byte between stages that save nothing, so that only messages are alive.
#[test]
fn waiting_before_the_next_send_keeps_one_buffer() {
    let table = by_name("gpipe").unwrap().table(&Shape { ranks: 2, chunks: 1, micro_batches: 8 }).unwrap();
    let stages = [StageBytes { input: 1, input_gradient: 1, ..StageBytes::default() }; 2];
    let peak = |waits| {
        let table = communicate(&table, waits).unwrap();
        simulate(&table, &Costs::default()).unwrap().peak_bytes(1, &stages)
    };
    // With late waits, all sent gradients stay alive. With waits before the next send, one sent gradient and the one
    // being computed stay alive.
    assert_eq!((peak(Waits::Late), peak(Waits::NextSend)), (8, 2));
}

/// If each stage saves a single byte until W, the number of live bytes equals the number of live activations.
#[test]
fn activations_are_the_bytes_of_stages_that_save_one_byte() {
    for schedule in all() {
        for (ranks, chunks, micro_batches) in [(1, 3, 4), (2, 1, 4), (4, 1, 8), (4, 2, 8), (3, 2, 9)] {
            let Ok(table) = schedule.table(&Shape { ranks, chunks, micro_batches }) else { continue };
            let timeline = simulate(&table, &Costs::default()).unwrap();
            let stages = vec![StageBytes { saved_until_weight: 1, ..StageBytes::default() }; (ranks * chunks) as usize];
            for rank in 0..ranks as usize {
                let (peak, bytes) = (timeline.peak(rank), timeline.peak_bytes(rank, &stages));
                assert_eq!(peak, bytes as i64, "{} {ranks} × {chunks}, {micro_batches}: rank {rank}", schedule.name());
            }
        }
    }
}

/// The slow count: every message and every saved byte is an interval of cells of the row. At each cell, the bytes of
/// the intervals around it are added up.
#[test]
fn as_intervals_say() {
    let bytes = |stage: u32| StageBytes {
        input: 1 + u64::from(stage),
        input_until: [LastReader::Forward, LastReader::InputGradient, LastReader::WeightGradient][stage as usize % 3],
        input_gradient: 100 + u64::from(stage),
        weight_reads_gradient: stage % 2 == 1,
        saved_until_input: 10_000 * u64::from(stage + 1),
        saved_until_weight: 1_000_000 * u64::from(stage + 2),
        kept_by_input: 100_000_000 * u64::from(stage + 3),
    };
    let mut judged = 0;
    for schedule in all() {
        for (ranks, chunks, micro_batches) in [(1, 3, 4), (2, 1, 4), (4, 1, 8), (2, 2, 6), (4, 2, 8)] {
            let Ok(table) = schedule.table(&Shape { ranks, chunks, micro_batches }) else { continue };
            let stages: Vec<StageBytes> = (0..ranks * chunks).map(bytes).collect();
            for waits in [Waits::Late, Waits::NextSend] {
                let table = communicate(&table, waits).unwrap();
                let timeline = simulate(&table, &Costs::default()).unwrap();
                for (rank, row) in table.iter().enumerate() {
                    judged += 1;
                    let expected = peak_by_intervals(row, &stages);
                    assert_eq!(timeline.peak_bytes(rank, &stages), expected, "{} rank {rank}", schedule.name());
                    assert_eq!(timeline.live_bytes(rank, &stages).last().unwrap().1, 0, "something stays alive");
                }
            }
        }
    }
    assert!(judged > 100, "{judged}");
}

fn peak_by_intervals(row: &[Cell], stages: &[StageBytes]) -> u64 {
    let words: Vec<Vec<String>> = row
        .iter()
        .map(|cell| match cell {
            Cell::Overlap(first, second) => vec![first.to_string(), second.to_string()],
            cell => vec![cell.to_string()],
        })
        .collect();
    let find = |word: String| words.iter().position(|words| words.contains(&word));
    let owned: BTreeSet<u32> = row.iter().flat_map(Cell::actions).map(|action| action.stage.0).collect();
    let mut lives: Vec<(usize, usize, u64)> = Vec::new();
    for action in row.iter().flat_map(Cell::actions).filter(|action| action.kind == Kind::Forward) {
        let (s, m) = (action.stage.0, action.micro_batch.0);
        let own = &stages[s as usize];
        let at = |word: &str| find(format!("{s}{word}{m}"));
        let forward = at("F").unwrap();
        let input = at("I").or(at("B")).unwrap();
        let weight = at("W").or(at("B")).unwrap();
        let until = match own.input_until {
            LastReader::Forward => forward,
            LastReader::InputGradient => input,
            LastReader::WeightGradient => weight,
        };
        let above = s.checked_sub(1).filter(|above| owned.contains(above));
        let born = above.and_then(|above| find(format!("{above}F{m}"))).or(at("RECV_F")).unwrap_or(forward);
        lives.push((born, until, own.input));
        lives.push((forward, input, own.saved_until_input));
        lives.push((forward, weight, own.saved_until_weight));
        if at("I").is_some() {
            lives.push((input, weight, own.kept_by_input));
        }
        if let Some(below) = stages.get(s as usize + 1) {
            let made = Some(s + 1)
                .filter(|below| owned.contains(below))
                .and_then(|below| find(format!("{below}I{m}")).or(find(format!("{below}B{m}"))));
            let until = if own.weight_reads_gradient { weight } else { input };
            lives.push((made.or(at("RECV_B")).unwrap(), until, below.input_gradient));
            if let Some(wait) = at("WAIT_SEND_F") {
                lives.push((forward, wait, below.input));
            }
        }
        if let Some(wait) = at("WAIT_SEND_B") {
            lives.push((input, wait, own.input_gradient));
        }
    }
    let alive =
        |at: usize| lives.iter().filter(|(born, dies, _)| (*born..=*dies).contains(&at)).map(|life| life.2).sum();
    (0..row.len()).map(alive).max().unwrap_or(0)
}
