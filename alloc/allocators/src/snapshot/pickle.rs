//! Reads pickles of plain data: numbers, text, lists, tuples, dicts.
//!
//! In: the bytes of a file from an untrusted source. Out: a table of [`Value`]s that refer to each other by number,
//! with text as ranges of the file. Never: an import or a call (their opcodes are refused), recursion, or a copy of a
//! shared value. So nesting, loops and sharing cost nothing, and memory stays within a few words per byte of the file.
//!
//! No crate is used, because `serde-pickle` 1.2 counts the references to each memoised value. So that crate fails on
//! shared values that contain memoised values, such as the stack frames of every snapshot. It also recurses without a
//! limit.

use std::ops::Range;

use super::SnapshotError;

/// Most values in one file. A table of this many values takes a few gigabytes.
const MAX_VALUES: usize = 1 << 26;

/// Number of a value in its [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ValueId(u32);

/// One value.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Integer(i64),
    /// UTF-8 text, as a range of the file.
    Text(Range<usize>),
    /// Lists and tuples.
    List(Vec<ValueId>),
    /// Keys and values, alternating.
    Dict(Vec<ValueId>),
    /// None, booleans, fractions, bytes and integers beyond 64 bits. The reader of snapshots uses none of them.
    Other,
}

/// A decoded file.
#[derive(Debug)]
pub(super) struct Pickle<'b> {
    bytes: &'b [u8],
    values: Vec<Value>,
    root: ValueId,
}

impl<'b> Pickle<'b> {
    /// Decodes a whole file.
    pub(super) fn read(bytes: &'b [u8]) -> Result<Self, SnapshotError> {
        let mut machine =
            Machine { bytes, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: Vec::new() };
        loop {
            let start = machine.at;
            if let Some(root) = machine.step(start)? {
                return Ok(Self { bytes, values: machine.values, root });
            }
        }
    }

    /// The outermost value.
    pub(super) fn root(&self) -> ValueId {
        self.root
    }

    pub(super) fn list(&self, id: ValueId) -> Option<&[ValueId]> {
        match self.value(id) {
            Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// Returns the value of a key in a dict. Returns `None` if the value is not a dict, has no such key, or has more
    /// than 1024 keys; the reader of snapshots needs no dict that large.
    pub(super) fn field(&self, id: ValueId, key: &str) -> Option<ValueId> {
        let Value::Dict(entries) = self.value(id) else { return None };
        if entries.len() > 2048 {
            return None;
        }
        // As in Python, the last of equal keys counts.
        let found = entries.chunks_exact(2).rev().find(|entry| self.text(entry[0]) == Some(key.as_bytes()));
        found.map(|entry| entry[1])
    }

    pub(super) fn integer(&self, id: ValueId) -> Option<i64> {
        match self.value(id) {
            Value::Integer(integer) => Some(*integer),
            _ => None,
        }
    }

    pub(super) fn text(&self, id: ValueId) -> Option<&'b [u8]> {
        match self.value(id) {
            Value::Text(range) => Some(&self.bytes[range.clone()]),
            _ => None,
        }
    }

    fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }
}

/// The stack machine that executes a pickle's opcodes.
struct Machine<'b> {
    bytes: &'b [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<ValueId>,
    /// Heights that the stack had at each open mark.
    marks: Vec<usize>,
    memo: Vec<ValueId>,
}

impl Machine<'_> {
    /// Executes the opcode at `start`. After the last opcode, returns the outermost value; before that, returns `None`.
    fn step(&mut self, start: usize) -> Result<Option<ValueId>, SnapshotError> {
        let malformed = || SnapshotError::Malformed { byte: start as u64 };
        let opcode = self.bytes[self.take(1)?.start];
        match opcode {
            // Headers of the protocol and of frames, and the end of the pickle.
            0x80 => _ = self.take(1)?,
            0x95 => _ = self.take(8)?,
            b'.' => return self.stack.pop().map(Some).ok_or_else(malformed),
            // None and booleans; numbers of one, two, four and eight bytes, and numbers whose length is given.
            b'N' | 0x88 | 0x89 => self.push(Value::Other)?,
            b'K' => self.push_unsigned(1)?,
            b'M' => self.push_unsigned(2)?,
            b'J' => self.push_signed(4)?,
            b'G' => self.push_other(8)?,
            0x8a => {
                let width = self.number(1)?;
                self.push_signed(width)?;
            }
            0x8b => {
                let width = self.number(4)?;
                self.push_signed(width)?;
            }
            // Text and bytes, preceded by a length of one, four or eight bytes.
            0x8c => self.push_text(1)?,
            b'X' => self.push_text(4)?,
            0x8d => self.push_text(8)?,
            b'C' => self.push_counted(1)?,
            b'B' => self.push_counted(4)?,
            0x8e => self.push_counted(8)?,
            // Containers.
            b'(' => {
                room(&self.marks)?;
                self.marks.push(self.stack.len());
            }
            b']' | b')' => self.push(Value::List(Vec::new()))?,
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b't' => {
                let items = self.above_mark().ok_or_else(malformed)?;
                self.push(Value::List(items))?;
            }
            0x85..=0x87 => {
                let items = self.pop(usize::from(opcode - 0x84)).ok_or_else(malformed)?;
                self.push(Value::List(items))?;
            }
            b'a' | b'e' => {
                let items = if opcode == b'a' { self.pop(1) } else { self.above_mark() };
                match (self.top(), items) {
                    (Some(Value::List(list)), Some(items)) => list.extend(items),
                    _ => return Err(malformed()),
                }
            }
            b's' | b'u' => {
                let entries = if opcode == b's' { self.pop(2) } else { self.above_mark() };
                match (self.top(), entries) {
                    (Some(Value::Dict(dict)), Some(entries)) if entries.len() % 2 == 0 => dict.extend(entries),
                    _ => return Err(malformed()),
                }
            }
            // The memo. Python numbers its entries consecutively.
            0x94 | b'q' | b'r' => {
                let number = match opcode {
                    b'q' => self.number(1)?,
                    b'r' => self.number(4)?,
                    _ => self.memo.len(),
                };
                room(&self.memo)?;
                self.memoise(number).ok_or_else(malformed)?;
            }
            b'h' | b'j' => {
                let number = self.number(if opcode == b'h' { 1 } else { 4 })?;
                room(&self.stack)?;
                self.stack.push(*self.memo.get(number).ok_or_else(malformed)?);
            }
            opcode => return Err(SnapshotError::NotPlainData { byte: start as u64, opcode }),
        }
        Ok(None)
    }

    /// Takes the next `count` bytes.
    fn take(&mut self, count: usize) -> Result<Range<usize>, SnapshotError> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or(SnapshotError::Truncated { byte: self.bytes.len() as u64 })?;
        Ok(std::mem::replace(&mut self.at, end)..end)
    }

    /// Reads an unsigned number of at most eight bytes, the lowest byte first.
    fn number(&mut self, width: usize) -> Result<usize, SnapshotError> {
        let range = self.take(width)?;
        let number = self.bytes[range].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
        Ok(usize::try_from(number).unwrap_or(usize::MAX))
    }

    fn push(&mut self, value: Value) -> Result<(), SnapshotError> {
        room(&self.values)?;
        self.stack.push(ValueId(self.values.len() as u32));
        self.values.push(value);
        Ok(())
    }

    fn push_unsigned(&mut self, width: usize) -> Result<(), SnapshotError> {
        let number = self.number(width)?;
        self.push(Value::Integer(number as i64))
    }

    /// Pushes a number in two's complement, the lowest byte first.
    fn push_signed(&mut self, width: usize) -> Result<(), SnapshotError> {
        let range = self.take(width)?;
        let bytes = &self.bytes[range];
        if bytes.len() > 8 {
            return self.push(Value::Other);
        }
        let sign = if bytes.last().is_some_and(|&byte| byte >= 0x80) { 0xff } else { 0 };
        let mut wide = [sign; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Integer(i64::from_le_bytes(wide)))
    }

    fn push_text(&mut self, width: usize) -> Result<(), SnapshotError> {
        let length = self.number(width)?;
        let range = self.take(length)?;
        self.push(Value::Text(range))
    }

    fn push_counted(&mut self, width: usize) -> Result<(), SnapshotError> {
        let length = self.number(width)?;
        self.push_other(length)
    }

    fn push_other(&mut self, width: usize) -> Result<(), SnapshotError> {
        self.take(width)?;
        self.push(Value::Other)
    }

    fn pop(&mut self, count: usize) -> Option<Vec<ValueId>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = self.stack.len().checked_sub(count).filter(|&from| from >= floor)?;
        Some(self.stack.split_off(from))
    }

    fn above_mark(&mut self) -> Option<Vec<ValueId>> {
        let mark = self.marks.pop()?;
        (mark <= self.stack.len()).then(|| self.stack.split_off(mark))
    }

    fn top(&mut self) -> Option<&mut Value> {
        let id = *self.stack.last()?;
        self.values.get_mut(id.0 as usize)
    }

    fn memoise(&mut self, number: usize) -> Option<()> {
        (number == self.memo.len()).then_some(())?;
        self.memo.push(*self.stack.last()?);
        Some(())
    }
}

/// Returns an error if a table has reached the limit on its entries.
fn room<T>(table: &[T]) -> Result<(), SnapshotError> {
    match table.len() {
        MAX_VALUES => Err(SnapshotError::TooLarge { what: "values", limit: MAX_VALUES as u64 }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pythons() {
        let check = |code: &[u8], expected: i64| {
            let bytes = [code, b"."].concat();
            let pickle = Pickle::read(&bytes).unwrap();
            assert_eq!(pickle.integer(pickle.root()), Some(expected), "{code:?}");
        };
        check(b"K\xff", 255);
        check(b"M\x00\xff", 0xff00);
        check(b"J\xff\xff\xff\xff", -1);
        check(b"\x8a\x00", 0);
        check(b"\x8a\x02\x00\xff", -256);
        check(b"\x8a\x06\x00\x00\x00\x00\x00\x7f", 0x7f00_0000_0000);
        check(b"\x8b\x01\x00\x00\x00\x80", -128);
    }

    #[test]
    fn nesting_and_loops_cost_nothing() {
        let mut deep = vec![b']'];
        (0..1_000_000).for_each(|_| deep.push(0x85));
        deep.push(b'.');
        assert!(Pickle::read(&deep).is_ok());
        let pickle = Pickle::read(b"]\x94h\x00a.").unwrap();
        assert_eq!(pickle.list(pickle.root()), Some([pickle.root()].as_slice()));
    }

    #[test]
    fn malformed_pickles_are_refused() {
        let check = |bytes: &[u8], expected: &str| {
            let error = Pickle::read(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{bytes:?}: {error}");
        };
        check(b"", "ends at byte 0");
        check(b"X\xff\xff\xff\xffabc", "ends at byte 8");
        check(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "ends at byte 9");
        check(b".", "byte 0: this is not what");
        check(b"a.", "byte 0: this is not what");
        check(b"K\x01K\x02a.", "byte 4: this is not what");
        check(b"](e", "ends at byte 3");
        check(b"}(K\x01u.", "byte 4: this is not what");
        check(b"h\x00.", "byte 0: this is not what");
        check(b"cos\nsystem\n.", "byte 0: the pickle has opcode 0x63");
        check(b"id,lower,upper,size", "byte 0: the pickle has opcode 0x69");
    }
}
