//! PyTorch's text form of a schedule: one row of comma-separated cells per rank.
//!
//! A cell is `stage KIND micro-batch` without spaces (`0F3`), or a pair `(0F3;3B1)OVERLAP_F_B`. An empty cell is an
//! idle slot. It does not affect the order and is dropped. The compute-only tables of `torch.distributed.pipelining`
//! have this form. PyTorch's lowered tables also have communication (`0SEND_F3`, `0UNSHARD`). The optimizer's step
//! (`0UPDATE`) is an addition of this crate.

use crate::{Action, Cell, Communication, CommunicationKind, Error, Kind, MicroBatch, StageId};

/// Writes one row per rank, without idle slots. Each row ends with a newline.
pub fn write_table(table: &[Vec<Cell>]) -> String {
    let row = |cells: &Vec<Cell>| cells.iter().map(Cell::to_string).collect::<Vec<_>>().join(",") + "\n";
    table.iter().map(row).collect()
}

/// Reads the output of [`write_table`], and PyTorch's own files.
///
/// # Errors
/// Returns [`Error::Cell`] for the first cell that does not have this form. Rows and cells count from 1.
pub fn read_table(text: &str) -> Result<Vec<Vec<Cell>>, Error> {
    let rows = text.lines().enumerate();
    rows.map(|(row, line)| {
        let cells = line.split(',').map(str::trim).enumerate().filter(|(_, text)| !text.is_empty());
        cells
            .map(|(cell, text)| {
                let bad = |expected| Error::Cell { row: row + 1, cell: cell + 1, text: text.to_owned(), expected };
                read_cell(text).map_err(bad)
            })
            .collect()
    })
    .collect()
}

const CELL: &str = "stage, kind and micro-batch (like 0F3, 0SEND_F3 or 0UNSHARD)";
const PAIR: &str = "a pair of a forward and a backward (like (0F3;3B1)OVERLAP_F_B)";

/// Reads one cell. The error is the description of what was expected instead.
fn read_cell(text: &str) -> Result<Cell, &'static str> {
    let Some(pair) = text.strip_prefix('(') else { return read_single(text).ok_or(CELL) };
    let pair = pair.strip_suffix(")OVERLAP_F_B").and_then(|pair| pair.split_once(';')).ok_or(PAIR)?;
    match (read_single(pair.0), read_single(pair.1)) {
        (Some(Cell::One(first)), Some(Cell::One(second)))
            if first.kind == Kind::Forward && second.kind != Kind::Forward =>
        {
            Ok(Cell::Overlap(first, second))
        }
        _ => Err(PAIR),
    }
}

fn read_single(text: &str) -> Option<Cell> {
    let (stage, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let (word, micro_batch) = rest.split_at(rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len()));
    let stage = stage.parse().ok()?;
    let number = || micro_batch.parse().ok();
    let kind = match word {
        "F" => Kind::Forward,
        "B" => Kind::Backward,
        "I" => Kind::BackwardInput,
        "W" => Kind::BackwardWeight,
        "UPDATE" => return micro_batch.is_empty().then_some(Cell::Update(StageId(stage))),
        _ => {
            let (kind, _) = *CommunicationKind::WORDS.iter().find(|(_, known)| *known == word)?;
            let micro_batch = match kind.has_micro_batch() {
                true => Some(MicroBatch(number()?)),
                false if micro_batch.is_empty() => None,
                false => return None,
            };
            return Some(Cell::Communicate(Communication { kind, stage: StageId(stage), micro_batch }));
        }
    };
    Some(Cell::One(Action::new(kind, stage, number()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        let text = "0F0,0F1,(0F2;3B0)OVERLAP_F_B,3I1,3W1,3UPDATE\n1UNSHARD,1RECV_F0,1F0,10B12\n";
        assert_eq!(write_table(&read_table(text).unwrap()), text);
        assert_eq!(write_table(&read_table("0F0,,0B0,\r\n,1F0, 1B0").unwrap()), "0F0,0B0\n1F0,1B0\n");
    }

    #[test]
    fn says_where_it_is_wrong() {
        for (text, row, cell, wrong) in [
            ("0F0,0X0", 1, 2, "0X0"),
            ("0F0\n,1F", 2, 2, "1F"),
            ("F0", 1, 1, "F0"),
            ("0F+1", 1, 1, "0F+1"),
            ("0SEND_F", 1, 1, "0SEND_F"),
            ("0F0,0UNSHARD0", 1, 2, "0UNSHARD0"),
            ("0UPDATE1", 1, 1, "0UPDATE1"),
            ("0F0,(0F1;1B0)", 1, 2, "(0F1;1B0)"),
            ("(0B1;1F0)OVERLAP_F_B", 1, 1, "(0B1;1F0)OVERLAP_F_B"),
            ("0F99999999999", 1, 1, "0F99999999999"),
            ("0é0", 1, 1, "0é0"),
        ] {
            match read_table(text) {
                Err(Error::Cell { row: r, cell: c, text: found, .. }) => {
                    assert_eq!((r, c, &*found), (row, cell, wrong))
                }
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }
}
