//! A schedule that is read from a table.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::{Placement, Schedule, Shape};
use crate::{Action, Cell, Error, read_table};

/// A table as a schedule. It exists for one shape only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tabulated {
    source: String,
    table: Vec<Vec<Cell>>,
    shape: Shape,
}

/// The largest file that is read, in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// Reads a table from a file, in the form of [`read_table`].
///
/// # Errors
/// Returns [`Error::Table`] if the file cannot be read, has more than 16 MiB, or does not have this form.
pub fn read_table_file(path: &Path) -> Result<Vec<Vec<Cell>>, Error> {
    let fail = |why: String| Error::Table { table: path.display().to_string(), why };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| fail(error.to_string()))?;
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(|error| fail(error.to_string()))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(fail(format!("it is longer than {MAX_BYTES} bytes")));
    }
    // An empty row is a rank without actions, except at the end of the text, where editors add an empty row.
    read_table(text.trim_end()).map_err(|error| fail(error.to_string()))
}

impl Tabulated {
    /// Creates a schedule from a table. Cells without actions, such as messages, are left out, because every program
    /// inserts its own. `source` names the table in messages.
    ///
    /// # Errors
    /// Returns [`Error::Table`] if the table has no actions, or if its stages are not the same number for each rank.
    pub fn new(source: &str, table: Vec<Vec<Cell>>) -> Result<Self, Error> {
        let fail = |why: String| Error::Table { table: source.to_owned(), why };
        let computes = |cell: &Cell| cell.actions().next().is_some();
        let table: Vec<Vec<Cell>> =
            table.into_iter().map(|row| row.into_iter().filter(computes).collect::<Vec<Cell>>()).collect();
        let actions = || table.iter().flatten().flat_map(Cell::actions);
        let (Some(stage), Some(micro_batch)) =
            (actions().map(|action| action.stage.0).max(), actions().map(|action| action.micro_batch.0).max())
        else {
            return Err(fail("it has no actions".to_owned()));
        };
        let (stages, micro_batches) = (u64::from(stage) + 1, u64::from(micro_batch) + 1);
        let ranks = table.len() as u64;
        if !stages.is_multiple_of(ranks) {
            return Err(fail(format!("its {stages} stages are not the same number for each of {ranks} ranks")));
        }
        let number = |n: u64| u32::try_from(n).map_err(|_| fail(format!("{n} is too large a number")));
        let shape =
            Shape { ranks: number(ranks)?, chunks: number(stages / ranks)?, micro_batches: number(micro_batches)? };
        Ok(Self { source: source.to_owned(), table, shape })
    }

    /// Reads a table with [`read_table_file`].
    ///
    /// # Errors
    /// Returns the errors of [`read_table_file`] and [`Self::new`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        // Absolute, so that a run that stores the path can be used from any directory.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Self::new(&path.display().to_string(), read_table_file(&path)?)
    }

    /// Returns the shape of the table.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    fn check_shape(&self, shape: &Shape) -> Result<(), Error> {
        if *shape == self.shape {
            return Ok(());
        }
        let text = |Shape { ranks, chunks, micro_batches }: &Shape| {
            format!("{ranks} pipeline rank(s), {chunks} chunk(s) and {micro_batches} micro-batch(es)")
        };
        let why = format!("it is for {}, not for {}; give the step the same numbers", text(&self.shape), text(shape));
        Err(Error::Table { table: self.source.clone(), why })
    }
}

impl Schedule for Tabulated {
    fn name(&self) -> &'static str {
        "table"
    }

    fn key(&self) -> String {
        self.source.clone()
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        self.check_shape(shape)?;
        Ok(self.table.iter().map(|row| row.iter().flat_map(Cell::actions).collect()).collect())
    }

    fn table(&self, shape: &Shape) -> Result<Vec<Vec<Cell>>, Error> {
        self.check_shape(shape)?;
        Ok(self.table.clone())
    }

    fn placement(&self) -> Placement {
        let last_of_v = (2 * self.shape.ranks).saturating_sub(1);
        let turns = self.table[0].iter().flat_map(Cell::actions).any(|action| action.stage.0 == last_of_v);
        if self.shape.ranks > 1 && turns { Placement::V } else { Placement::Loop }
    }

    fn usual_chunks(&self) -> u32 {
        self.shape.chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OneForwardOneBackward, Zbv, by_name, communicate, write_table};

    /// A table is the schedule that it was written from, with or without messages.
    #[test]
    fn a_written_schedule_is_read_again() {
        let folder = std::env::temp_dir().join(format!("gapless-tabulated-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("order.csv");
        let shape = Shape { ranks: 2, chunks: 2, micro_batches: 4 };
        let table = Zbv.table(&shape).unwrap();
        for text in [write_table(&table), write_table(&communicate(&table, crate::Waits::Late).unwrap())] {
            std::fs::write(&path, text).unwrap();
            let read = by_name(path.to_str().unwrap()).unwrap();
            assert_eq!(read.table(&shape).unwrap(), table);
            assert_eq!((read.placement(), read.usual_chunks()), (Placement::V, 2));
            assert_eq!(read.key(), path.to_str().unwrap());
            let error = read.table(&Shape { micro_batches: 5, ..shape }).unwrap_err().to_string();
            assert!(error.contains("2 chunk(s) and 4 micro-batch(es), not for "), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        let error = by_name("missing.csv").err().unwrap().to_string();
        assert!(error.contains("missing.csv: "), "{error}");
    }

    #[test]
    fn tables_that_are_no_schedule_are_refused() {
        let check = |text: &str, words: &str| {
            let error = Tabulated::new("it", read_table(text).unwrap()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        check("\n", "no actions");
        check("0F0,0B0\n1F0,2F0,2B0,1B0", "3 stages are not the same number for each of 2 ranks");
        let shape = Shape { ranks: 3, chunks: 1, micro_batches: 2 };
        let table = OneForwardOneBackward.table(&shape).unwrap();
        assert_eq!(Tabulated::new("it", table).unwrap().shape(), shape);
    }
}
