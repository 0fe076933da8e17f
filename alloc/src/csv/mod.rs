//! Tables of buffers with minimalloc's columns: `id,lower,upper,size[,alignment][,gaps][,hint][,offset]`.
//!
//! In: UTF-8 text with a header line; every other line has one field per column. Columns may be in any order, and
//! unknown columns are ignored. Out: a [`Table`]. Every error names the line of the file, or the tick of the problem.
//! The caller decides how the offsets of a table are used; [`Table::pinned`] reads them as pins, which is minimalloc's
//! meaning.
//!
//! ```text
//! id,lower,upper,size,offset
//! b1,0,3,4,8        8 ≤ address < 12 during [0, 3), and nowhere else
//! b2,3,9,4,         anywhere
//! ```

mod gaps;
mod header;
mod read;

use std::io::Write;

pub use read::read;

use crate::{Buffer, BufferId, Error, Gap, Pieces, Problem};

/// A problem, with everything else that the file says about the buffers.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Ids as written, indexed by [`BufferId`].
    pub ids: Vec<String>,
    /// The buffers without pins and gaps.
    pub problem: Problem,
    /// The `offset` column, or `None` if the table has no such column. An entry is `None` if its field is empty.
    pub offsets: Option<Vec<Option<u64>>>,
    /// The `hint` column, which has addresses to prefer, or `None` if the table has no such column. An entry is `None`
    /// if its buffer has no hint.
    pub hints: Option<Vec<Option<u64>>>,
    /// The `gaps` column, ordered by buffer and time; [`pieces`](Self::pieces) puts the gaps to use.
    pub gaps: Vec<Gap>,
    /// For each buffer that follows a blank line, the buffer's index and line number.
    lines: Vec<(usize, u64)>,
}

impl Table {
    /// Creates a table of buffers with these ids, without offsets or gaps.
    pub fn new(ids: Vec<String>, problem: Problem) -> Self {
        Self { ids, problem, ..Self::default() }
    }

    /// Returns the problem in which every offset of the table is a pin.
    ///
    /// # Errors
    /// Returns [`Error::Csv`] with the line if an offset is not a multiple of its alignment or leaves the address
    /// space, or if two buffers share bytes while both are alive. Gaps are not taken into account; see
    /// [`pieces`](Self::pieces).
    pub fn pinned(&self) -> Result<Problem, Error> {
        let Some(offsets) = &self.offsets else { return Ok(self.problem.clone()) };
        let pin = |(b, &offset): (&Buffer, &Option<u64>)| Buffer { offset, ..b.clone() };
        let pinned = Problem::new(self.problem.buffers().iter().zip(offsets).map(pin).collect());
        pinned.map_err(|error| self.at_line(error, |id| id))
    }

    /// Returns the problem in which buffers with gaps are replaced by their pieces. If `pinned`, every offset of the
    /// table is a pin.
    ///
    /// # Errors
    /// Returns [`Error::Csv`] with the line if an offset is not a multiple of its alignment or leaves the address
    /// space, or if two buffers share bytes that both need at the same time.
    pub fn pieces(&self, pinned: bool) -> Result<Pieces, Error> {
        let pieces = Pieces::new(&self.problem, &self.gaps)?;
        match &self.offsets {
            Some(offsets) if pinned => {
                let pinned = pieces.pinned(offsets);
                pinned.map_err(|error| self.at_line(error, |id| pieces.origin(id)))
            }
            _ => Ok(pieces),
        }
    }

    /// Returns an error of pinned buffers with the line of the buffer. `origin` returns the buffer of the table for a
    /// buffer of the problem.
    fn at_line(&self, error: Error, origin: impl Fn(BufferId) -> BufferId) -> Error {
        let origin = |buffer: usize| origin(BufferId(buffer as u32)).index();
        let (buffer, what) = match error {
            Error::Misaligned { buffer, offset, alignment } => {
                (origin(buffer), format!("offset {offset} is not a multiple of alignment {alignment}"))
            }
            Error::OutOfAddressSpace { buffer, offset, bytes } => (
                origin(buffer),
                format!("{bytes} bytes at offset {offset} end past the address space (2^64 - 1 bytes)"),
            ),
            Error::PinsOverlap { first, second } => {
                let (first, second) = (origin(first), origin(second));
                let (id, other, at) = (&self.ids[second], &self.ids[first], self.line(first));
                let what =
                    format!("the offset puts {id:?} onto {other:?} of line {at}, which is alive at the same time");
                (second, what)
            }
            error => return error,
        };
        Error::Csv { line: self.line(buffer), what }
    }

    /// Returns the `offset` column as a plan, or `None` if any buffer has no offset.
    pub fn plan(&self) -> Option<Vec<u64>> {
        self.offsets.as_ref()?.iter().copied().collect()
    }

    /// Returns the line number of a buffer.
    fn line(&self, buffer: usize) -> u64 {
        // Lines count from 1, and the first is the header.
        let last = self.lines.partition_point(|&(first, _)| first <= buffer).checked_sub(1);
        let (first, line) = last.map_or((0, 2), |last| self.lines[last]);
        line + (buffer - first) as u64
    }

    /// Writes the table in minimalloc's format. `offsets` fills the column `offset`; with `None` there is no such
    /// column.
    ///
    /// # Errors
    /// Returns an error only if the writer fails.
    pub fn write(&self, mut out: impl Write, offsets: Option<&[u64]>) -> Result<(), Error> {
        let buffers = self.problem.buffers();
        let aligned = buffers.iter().any(|b| b.alignment != 1);
        let named = |wanted: bool, name: &'static str| if wanted { name } else { "" };
        write!(out, "id,lower,upper,size{}", named(aligned, ",alignment"))?;
        write!(out, "{}{}", named(!self.gaps.is_empty(), ",gaps"), named(self.hints.is_some(), ",hint"))?;
        writeln!(out, "{}", named(offsets.is_some(), ",offset"))?;
        let mut gaps = self.gaps.iter().peekable();
        for (index, (id, b)) in self.ids.iter().zip(buffers).enumerate() {
            write!(out, "{id},{},{},{}", b.lifetime.start, b.lifetime.end, b.bytes)?;
            if aligned {
                write!(out, ",{}", b.alignment)?;
            }
            if !self.gaps.is_empty() {
                write!(out, ",")?;
                let mut space = "";
                while let Some(gap) = gaps.next_if(|gap| gap.buffer.index() == index) {
                    write!(out, "{space}{gap}")?;
                    space = " ";
                }
            }
            match self.hints.as_ref().map(|hints| hints[index]) {
                Some(Some(hint)) => write!(out, ",{hint}")?,
                // minimalloc writes -1 if there is no hint.
                Some(None) => write!(out, ",-1")?,
                None => {}
            }
            if let Some(offsets) = offsets {
                write!(out, ",{}", offsets[index])?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower_bound;

    fn written(table: &Table, offsets: Option<&[u64]>) -> String {
        let mut out = Vec::new();
        table.write(&mut out, offsets).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn reads_what_it_wrote() {
        for text in [
            "id,lower,upper,size,alignment,offset\nb1,0,3,4,4,0\nb2,3,9,4,1,8\n",
            "id,lower,upper,size,gaps,hint,offset\nb1,0,9,4,2-3 5-6@0:2,8,0\nb2,3,9,4,,-1,8\n",
        ] {
            let table = read(text.as_bytes()).unwrap();
            assert_eq!(written(&table, table.plan().as_deref()), text);
        }
    }

    #[test]
    fn takes_the_names_that_minimalloc_does() {
        let check = |header: &str, row: &str, expected: &str| {
            let table = read(format!("{header}\n{row}\n").as_bytes()).unwrap();
            assert_eq!(written(&table, table.plan().as_deref()).lines().nth(1), Some(expected), "{header}");
        };
        check("buffer,start,upper,size", "a,0,3,4", "a,0,3,4");
        check("buffer_id,begin,upper,size,note", "a,0,3,4,hello", "a,0,3,4");
        // `end` is the last tick, not the one after it, and the same holds in gaps.
        check("id,start,end,size", "a,0,2,4", "a,0,3,4");
        check("id,start,end,size", "a,2,2,4", "a,2,3,4");
        check("id,start,end,size,gaps,hint", "a,0,9,4,1-2 4-4@1:3,64", "a,0,10,4,1-3 4-5@1:3,64");
        check("Size,OFFSET,id,lower,upper,", "4,64,a,0,9,", "a,0,9,4,64");
    }

    #[test]
    fn an_offset_is_a_pin_and_need_not_be_there() {
        let table = read(&b"id,lower,upper,size,alignment,offset\na,0,3,4,4,8\n\n\nb,0,3,4,1,\n"[..]).unwrap();
        assert!(table.problem.buffers().iter().all(|b| b.offset.is_none()));
        let offsets: Vec<_> = table.pinned().unwrap().buffers().iter().map(|b| b.offset).collect();
        assert_eq!((offsets, table.plan()), (vec![Some(8), None], None));
        let check = |rows: &str, expected: &str| {
            let table = read(format!("\nid,lower,upper,size,alignment,offset\n{rows}").as_bytes()).unwrap();
            assert_eq!(table.pinned().unwrap_err().to_string(), expected);
        };
        check("a,0,3,4,1,\n\n\nb,0,3,4,4,6\n", "line 6: offset 6 is not a multiple of alignment 4");
        check(
            "a,0,3,4,1,18446744073709551614\n",
            "line 3: 4 bytes at offset 18446744073709551614 end past the address space (2^64 - 1 bytes)",
        );
        check(
            "a,0,3,4,1,8\n\nb,0,1,4,1,0\nc,2,5,4,1,11\n",
            "line 6: the offset puts \"c\" onto \"a\" of line 3, which is alive at the same time",
        );
    }

    /// A pin onto bytes that another buffer does not need at that time is no error.
    #[test]
    fn pins_may_use_gaps() {
        let check = |gaps: &str, expected: Result<u64, &str>| {
            let text = format!("id,lower,upper,size,gaps,offset\na,0,9,8,{gaps},0\nb,3,5,4,,4\n");
            let pieces = read(text.as_bytes()).unwrap().pieces(true);
            match expected {
                Ok(bound) => assert_eq!(lower_bound(&pieces.unwrap().problem), bound, "{gaps}"),
                Err(error) => assert!(pieces.unwrap_err().to_string().contains(error), "{gaps}"),
            }
        };
        let taken = Err("line 2: the offset puts \"a\" onto \"b\" of line 3, which is alive at the same time");
        check("3-5", Ok(8));
        check("3-4", taken);
        check("0-4@2:4 4-9@0:8", taken);
        check("0-4@2:4 4-9@0:2", Ok(6));
    }
}
