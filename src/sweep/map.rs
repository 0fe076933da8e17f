//! A coarse memory map of a plan, small enough for a row of a sweep.

use gapless_alloc::{Label, Problem, Role};

/// Number of columns, which divide the step's ticks evenly.
const COLUMNS: u64 = 160;
/// Number of cells of a column, which divide the arena evenly.
const CELLS: u64 = 120;
/// The letter of a cell without a buffer.
const UNUSED: char = '.';

/// Returns a column for each of 160 ticks, from the first to the last. A column has 120 cells, from offset 0 to the end
/// of the arena. Its text has runs of equal cells: their number, and the letter of a role (`a` for the first of
/// [`Role::ALL`], and so on) or `.` for unused bytes. A cell belongs to the largest buffer that it touches.
pub(super) fn coarse_map(problem: &Problem, offsets: &[u64], labels: &[Label], arena_bytes: u64) -> Vec<String> {
    let end = problem.buffers().iter().map(|buffer| buffer.lifetime.end).max().unwrap_or(0);
    let mut columns = vec![[UNUSED; CELLS as usize]; COLUMNS as usize];
    let mut by_size: Vec<usize> = (0..problem.len()).collect();
    by_size.sort_by_key(|&index| problem.buffers()[index].bytes);
    // Each column shows the tick in the middle of its range.
    let ticks: Vec<u64> = (0..COLUMNS).map(|column| (2 * column + 1) * end / (2 * COLUMNS)).collect();
    let first_at = |from: u64| ticks.partition_point(|&tick| tick < from);
    for index in by_size {
        let (buffer, offset) = (&problem.buffers()[index], offsets[index]);
        let role = Role::ALL.iter().position(|role| *role == labels[index].role).unwrap_or(0);
        let letter = char::from(b'a' + role as u8);
        let cell = |bytes: u64| (u128::from(bytes) * u128::from(CELLS) / u128::from(arena_bytes.max(1))) as usize;
        let last = cell((offset + buffer.bytes).saturating_sub(1)).min(CELLS as usize - 1);
        for column in &mut columns[first_at(buffer.lifetime.start)..first_at(buffer.lifetime.end)] {
            column[cell(offset).min(last)..=last].fill(letter);
        }
    }
    columns.iter().map(|cells| runs(cells)).collect()
}

fn runs(cells: &[char]) -> String {
    cells.chunk_by(|a, b| a == b).map(|run| format!("{}{}", run.len(), run[0])).collect()
}

#[cfg(test)]
mod tests {
    use gapless_alloc::Buffer;

    use super::*;

    /// A parameter at the bottom, and an activation above it in the second half of the step.
    #[test]
    fn a_map_has_the_roles_in_their_places() {
        let problem = Problem::new(vec![Buffer::new(0..320, 40), Buffer::new(160..320, 60)]).unwrap();
        let label = |role| Label { tensor: String::new(), op: String::new(), layer: String::new(), role };
        let map = coarse_map(&problem, &[0, 40], &[Role::Parameter, Role::Activation].map(label), 120);
        assert_eq!(map.len(), COLUMNS as usize);
        assert_eq!((&*map[0], &*map[79]), ("40a80.", "40a80."));
        assert_eq!((&*map[80], &*map[159]), ("40a60e20.", "40a60e20."));
    }
}
