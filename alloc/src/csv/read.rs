//! Reading a table line by line.

use std::collections::HashSet;
use std::io::{BufRead, Read};

use super::{Table, gaps, header};
use crate::{Buffer, BufferId, Error, Problem};

/// Longest line that is accepted. A longer line (in a binary file, or in a file without line breaks) must not fill the
/// memory.
const LONGEST_LINE: usize = 64 << 10;

/// Reads a table. Memory use grows with the buffers that were read, not with counts that a broken file claims.
///
/// # Errors
/// Returns [`Error::Csv`] with the line if
///
/// - a column is missing or occurs twice, or a line has more or fewer fields than there are columns;
/// - a field is not a number from 0 to 2^64 - 1, `lower >= upper`, or an alignment is 0;
/// - a gap lies outside of its lifetime, or an id is repeated;
/// - the text is not UTF-8, or a line is longer than 64 KiB.
///
/// Returns [`Error::TooLarge`] with the tick at which too many bytes are alive.
pub fn read(input: impl BufRead) -> Result<Table, Error> {
    let mut lines = Lines { input, number: 0, bytes: Vec::new() };
    let columns = match lines.next()? {
        Some((line, header)) => header::columns(line, header)?,
        None => return Err(Error::Csv { line: 1, what: "empty file; expected the header id,lower,upper,size".into() }),
    };
    let mut table = Table {
        offsets: columns.offset.map(|_| Vec::new()),
        hints: columns.hint.map(|_| Vec::new()),
        ..Table::default()
    };
    let mut buffers = Vec::new();
    let mut seen = Seen::default();
    while let Some((line, text)) = lines.next()? {
        let fields = Fields { line, text };
        let count = text.bytes().filter(|&byte| byte == b',').count() + 1;
        if count != columns.count {
            let s = if count == 1 { "" } else { "s" };
            return fields.fail(format!("{count} field{s}, but the header has {} columns", columns.count));
        }
        let id = fields.text(columns.id);
        let (lower, last) = (fields.integer(columns.lower, "lower")?, fields.integer(columns.upper, "upper")?);
        let Some(upper) = last.checked_add(columns.after_last) else {
            return fields.fail(format!("end {last} is too large; it is inclusive, so it must be below 2^64 - 1"));
        };
        if lower >= upper {
            return fields.fail(match columns.after_last {
                0 => format!("lower {lower} is not below upper {upper}"),
                _ => format!("start {lower} is after end {last}"),
            });
        }
        let mut buffer = Buffer::new(lower..upper, fields.integer(columns.size, "size")?);
        if let Some(column) = columns.alignment {
            buffer.alignment = fields.integer(column, "alignment")?;
            if buffer.alignment == 0 {
                return fields.fail("alignment 0; the smallest alignment is 1".into());
            }
        }
        if let Some(column) = columns.gaps {
            // More buffers than a `u32` can count are refused below.
            let buffer_id = BufferId(buffers.len() as u32);
            let field = fields.text(column);
            match gaps::parse(field, buffer_id, &buffer, columns.after_last) {
                Ok(gaps) => table.gaps.extend(gaps),
                Err(what) => return fields.fail(format!("gaps {}: {what}", shown(field))),
            }
        }
        if let (Some(column), Some(hints)) = (columns.hint, &mut table.hints) {
            // minimalloc writes -1 if there is no hint.
            hints.push(if fields.text(column) == "-1" { None } else { fields.optional(column, "hint")? });
        }
        if let (Some(column), Some(offsets)) = (columns.offset, &mut table.offsets) {
            offsets.push(fields.optional(column, "offset")?);
        }
        if !seen.is_new(&table.ids, id) {
            return fields.fail(format!("id {} appears twice", shown(id)));
        }
        if table.line(buffers.len()) != line {
            table.lines.push((buffers.len(), line));
        }
        table.ids.push(id.to_owned());
        buffers.push(buffer);
    }
    table.problem = Problem::new(buffers)?;
    Ok(table)
}

/// The ids seen so far. As long as each id sorts after the one before (`9`, `10`, `11`), no id needs to be stored.
#[derive(Default)]
struct Seen {
    /// 128-bit hashes of the ids, so that ten million ids need not be stored a second time.
    hashes: Option<HashSet<u128>>,
}

impl Seen {
    /// True if `id` is not among `ids`. Every element of `ids` must have been passed to this function before, in this
    /// order.
    fn is_new(&mut self, ids: &[String], id: &str) -> bool {
        let hash = |id: &str| {
            let hash = blake3::hash(id.as_bytes());
            u128::from_le_bytes(std::array::from_fn(|k| hash.as_bytes()[k]))
        };
        match &mut self.hashes {
            None if ids.last().is_none_or(|last| (last.len(), last.as_str()) < (id.len(), id)) => true,
            None => {
                let hashes = self.hashes.insert(ids.iter().map(|id| hash(id)).collect());
                hashes.insert(hash(id))
            }
            Some(hashes) => hashes.insert(hash(id)),
        }
    }
}

/// The fields of one line, as many as there are columns.
struct Fields<'l> {
    line: u64,
    text: &'l str,
}

impl<'l> Fields<'l> {
    fn fail<T>(&self, what: String) -> Result<T, Error> {
        Err(Error::Csv { line: self.line, what })
    }

    fn text(&self, column: usize) -> &'l str {
        self.text.split(',').nth(column).map_or("", str::trim)
    }

    fn integer(&self, column: usize, name: &str) -> Result<u64, Error> {
        let text = self.text(column);
        text.parse()
            .or_else(|e| self.fail(format!("{name} {} is not a whole number of 0 to 2^64 - 1: {e}", shown(text))))
    }

    fn optional(&self, column: usize, name: &str) -> Result<Option<u64>, Error> {
        if self.text(column).is_empty() { Ok(None) } else { self.integer(column, name).map(Some) }
    }
}

/// A piece of the input as a message shows it: quoted and shortened.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((cut, _)) => format!("{:?}…", &text[..cut]),
        None => format!("{text:?}"),
    }
}

/// The lines of a table that are not blank, with their line numbers.
struct Lines<R> {
    input: R,
    number: u64,
    bytes: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Result<Option<(u64, &str)>, Error> {
        loop {
            self.bytes.clear();
            self.number += 1;
            let line = self.number;
            let mut limited = (&mut self.input).take(LONGEST_LINE as u64 + 1);
            if limited.read_until(b'\n', &mut self.bytes)? == 0 {
                return Ok(None);
            }
            if self.bytes.len() > LONGEST_LINE {
                return Err(Error::Csv { line, what: format!("longer than {LONGEST_LINE} bytes; is this a table?") });
            }
            if self.bytes.iter().any(|b| !b.is_ascii_whitespace()) {
                break;
            }
        }
        let line = self.number;
        let text = str::from_utf8(&self.bytes);
        let text = text.map_err(|e| Error::Csv { line, what: format!("not UTF-8 text: {e}") })?;
        Ok(Some((line, text.trim())))
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    #[test]
    fn names_the_line_of_an_error() {
        let check = |rows: &str, expected: &str| {
            let error = read(format!("id,lower,upper,size\n{rows}").as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check("a,0,1,4\na,1,2,4\n", "line 3: id \"a\" appears twice");
        check("a,0,1,4\nb,0,1,4\na,0,1,4\n", "line 4: id \"a\" appears twice");
        check("9,0,1,4\n10,0,1,4\n2,0,1,4\n\n10,0,1,4\n", "line 6: id \"10\" appears twice");
        check("a,1,1,4\n", "line 2: lower 1 is not below upper 1");
        check("a,2,1,4\n", "line 2: lower 2 is not below upper 1");
        check("a,-1,1,4\n", "line 2: lower \"-1\"");
        check("a,0,-1,4\n", "line 2: upper \"-1\"");
        check("a,0,1,-4\n", "line 2: size \"-4\"");
        check("a,0,18446744073709551616,4\n", "line 2: upper \"18446744073709551616\"");
        check("a,0,1,\n", "line 2: size \"\"");
        check("a,0,1,99999999999999999999\n", "line 2: size");
        check("a,0,1\n", "line 2: 3 fields, but the header has 4 columns");
        check("a\n", "line 2: 1 field, but the header has 4 columns");
        check("a,0,1,4\nb,0,1,4,5\n", "line 3: 5 fields, but the header has 4 columns");
        check("a,0,1,4,\n", "line 2: 5 fields, but the header has 4 columns");
        check("\n\na,0,1,1.5\n", "line 4: size \"1.5\"");
        check(&format!("a,0,1,{}\n", "9".repeat(100)), "line 2: size \"9999");
        check(&"x".repeat(1 << 20), "line 2: longer than 65536 bytes");
        check("a,0,9,18446744073709551615\nb,7,8,1\n", "18446744073709551616 bytes are alive at tick 7");
    }

    #[test]
    fn reads_tables_as_people_write_them() {
        let check = |text: &[u8], expected: Result<usize, &str>| match (read(text), expected) {
            (Ok(table), Ok(buffers)) => assert_eq!(table.problem.len(), buffers),
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (result, expected) => panic!("{result:?} instead of {expected:?}"),
        };
        check(b"\xef\xbb\xbfID, Lower ,UPPER,size\r\na , 0,1, 4 \r\n\r\nb,1,2,4", Ok(2));
        check(b"size,upper,note,lower,id\n4,1,hello,0,a\n", Ok(1));
        check(b"id,lower,upper,size\n", Ok(0));
        check(b"", Err("line 1: empty file"));
        check(b"\n \n", Err("line 1: empty file"));
        check(b"id,lower,upper\n", Err("line 1: no column \"size\""));
        check(b"\xff\xfei\0d\0", Err("line 1: not UTF-8 text"));
        check(b"id,lower,upper,size\n\xff\xfe,0,1,4\n", Err("line 2: not UTF-8 text"));
        check(b"id,lower,upper,size\nz,7,9,4\ny,0,3,4\n2,1,8,4\n1,0,9,4\n", Ok(4));
        check(b"id,lower,upper,size,offset\na,0,1,4,-8\n", Err("line 2: offset \"-8\""));
        check(b"id,lower,upper,size,alignment\na,0,1,4,0\n", Err("line 2: alignment 0"));
        check(b"id,lower,upper,size,hint\na,0,1,4,-1\nb,0,1,4,\nc,0,1,4,64\n", Ok(3));
        check(b"id,lower,upper,size,hint\na,0,1,4,high\n", Err("line 2: hint \"high\""));
        check(b"\nid,lower,upper,size,lower\n", Err("line 2: column \"lower\" appears twice in the header"));
        check(b"id,note,upper,lower,size,Note\n", Err("line 1: column \"note\" appears twice in the header"));
        check(
            b"id,upper,lower,size,end\n",
            Err("line 1: columns \"upper\" and \"end\" of the header mean the same; leave one out"),
        );
        check(b"id,start,end,size\na,3,2,4\n", Err("line 2: start 3 is after end 2"));
        check(b"id,start,end,size\na,3,18446744073709551615,4\n", Err("is inclusive, so it must be below"));
        for gaps in ["3", "3-", "3-3", "0-2 1-3", "0-9", "1-2@0:5", "1-2@3:1", "1-2@0", "1-18446744073709551616"] {
            let text = format!("id,lower,upper,size,gaps\na,0,8,4,{gaps}\n");
            check(text.as_bytes(), Err(&format!("line 2: gaps {gaps:?}: ")));
        }
    }

    generated! {
        /// Reading any bytes ends with a table or an error.
        #[test]
        fn reads_anything(bytes in prop::collection::vec(any::<u8>(), 0..400), header: bool) {
            let mut text = if header { b"id,start,end,size,gaps,hint,offset\n".to_vec() } else { Vec::new() };
            text.extend(&bytes);
            let _ = read(&text[..]);
        }

        /// Reading text that is nearly a table ends with a table or an error.
        #[test]
        fn reads_near_tables(rows in "([a-c0-9-]{1,2},[0-9-]{0,21},[0-9]{1,3},[0-9]{1,21}[\r\n,]{1,2}){0,20}") {
            let _ = read(format!("id,lower,upper,size\n{rows}").as_bytes());
        }

        /// A table that was read can be written. Reading the written table gives the same table.
        #[test]
        fn reads_what_was_written(
            rows in "([a-z]{3},[0-9],[1-9][0-9],[4-9],([1-9]-1[0-9](@[01]:[23])?)?,(-1|[0-9])?,[0-9]?\n){0,4}",
        ) {
            let Ok(table) = read(format!("buffer,begin,end,size,gaps,hint,offset\n{rows}").as_bytes()) else { return Ok(()) };
            let mut text = Vec::new();
            table.write(&mut text, table.plan().as_deref()).unwrap();
            let again = read(&text[..]).unwrap();
            prop_assert_eq!(table.problem.buffers(), again.problem.buffers());
            prop_assert_eq!((table.gaps, table.hints), (again.gaps, again.hints));
        }
    }
}
