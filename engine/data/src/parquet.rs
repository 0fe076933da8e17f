//! Rows of Parquet files.
//!
//! In: a path. Out: each row as the line of a .jsonl file that it would be. Never: columns that no format reads; a file in memory as a
//! whole.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

use crate::DataError;

/// The columns that a [`Format`](crate::Format) reads.
const COLUMNS: [&str; 5] = ["text", "prompt", "completion", "response", "messages"];

/// Visits the rows, with their numbers, counted from 1.
///
/// # Errors
/// A file that cannot be read or is damaged; none of the columns; the visitor's.
pub(crate) fn each_row(
    path: &Path,
    mut visit: impl FnMut(usize, &str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let file = File::open(path).map_err(|error| DataError::read(path, error))?;
    let mut rows = guarded(path, || rows(file))?;
    let mut number = 0;
    while let Some(row) = guarded(path, || rows.next().transpose())? {
        number += 1;
        visit(number, &row.to_json_value().to_string())?;
    }
    Ok(())
}

/// The rows of a file, of the columns that are read.
fn rows(file: File) -> ParquetResult<RowIter<'static>> {
    let reader = SerializedFileReader::new(file)?;
    let schema = reader.metadata().file_metadata().schema();
    let read = |column: &&Arc<Type>| COLUMNS.contains(&column.name());
    let columns: Vec<Arc<Type>> = schema.get_fields().iter().filter(read).cloned().collect();
    if columns.is_empty() {
        let there: Vec<&str> = schema.get_fields().iter().map(|column| column.name()).collect();
        return Err(ParquetError::General(format!("its columns are {}", there.join(", "))));
    }
    let columns = Type::group_type_builder(schema.name()).with_fields(columns).build()?;
    RowIter::from_file_into(Box::new(reader)).project(Some(columns))
}

/// What the library answers. Of some files that are damaged it panics.
fn guarded<T>(path: &Path, call: impl FnOnce() -> ParquetResult<T>) -> Result<T, DataError> {
    let fail = |reason: String| DataError::Parquet { path: path.to_owned(), reason };
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => answer.map_err(|error| fail(error.to_string())),
        Err(_panic) => Err(fail("its parts contradict each other".into())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use parquet::basic::{Compression, ZstdLevel};
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
    use parquet::schema::parser::parse_message_type;

    use super::*;
    use crate::{Corpus, DataOptions, Dataset, Format, VocabularyChoice};

    /// A file of row groups, each written by `group`.
    fn write(
        schema: &str,
        compression: Compression,
        groups: usize,
        group: impl Fn(usize, &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>),
    ) -> Vec<u8> {
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = WriterProperties::builder().set_compression(compression).build();
        let mut bytes = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
        for index in 0..groups {
            let mut rows = writer.next_row_group().unwrap();
            group(index, &mut rows);
            rows.close().unwrap();
        }
        writer.close().unwrap();
        bytes
    }

    fn write_strings(
        group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
        values: &[&str],
        definitions: Option<&[i16]>,
        repetitions: Option<&[i16]>,
    ) {
        let values: Vec<ByteArray> = values.iter().map(|&value| value.into()).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, definitions, repetitions).unwrap();
        column.close().unwrap();
    }

    /// Two row groups of an identifier, which is not read, and texts.
    fn texts(compression: Compression) -> Vec<u8> {
        let schema = "message texts { required int64 id; optional binary text (STRING); }";
        write(schema, compression, 2, |index, group| {
            let mut ids = group.next_column().unwrap().unwrap();
            ids.typed::<Int64Type>().write_batch(&[7, 8, 9], None, None).unwrap();
            ids.close().unwrap();
            let texts = if index == 0 { ["one é", "", "a \"quoted\"\nline"] } else { ["four", "five\u{0}", "six"] };
            write_strings(group, &texts, Some(&[1, 1, 1]), None);
        })
    }

    #[test]
    fn texts_of_rows_are_documents() {
        let folder = tempfile::tempdir().unwrap();
        let expected = Corpus::from_texts(["one é", "a \"quoted\"\nline", "four", "five\u{0}", "six"]).report().hash;
        let zstd = Compression::ZSTD(ZstdLevel::default());
        for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, zstd, Compression::LZ4_RAW] {
            let path = folder.path().join("texts.parquet");
            fs::write(&path, texts(compression)).unwrap();
            assert_eq!(Corpus::read(&path).unwrap().report().hash, expected, "{compression}");
            let options = DataOptions {
                vocabulary: VocabularyChoice::Bytes,
                cache: folder.path().join("cache"),
                ..DataOptions::default()
            };
            // Below a folder, and streamed.
            let dataset = Dataset::prepare(&crate::Source::Path(folder.path().to_owned()), &options).unwrap();
            assert_eq!(dataset.corpus().unwrap().hash, expected);
        }
    }

    #[test]
    fn conversations_and_answers_are_examples() {
        let schema = "message chat { optional group messages (LIST) { repeated group list { optional group element {
            required binary role (STRING); required binary content (STRING); } } } }";
        let chat = write(schema, Compression::SNAPPY, 1, |_, group| {
            // One conversation of three messages, one of two.
            let (definitions, repetitions) = ([3; 5], [0, 1, 1, 0, 1]);
            let roles = ["system", "user", "assistant", "user", "assistant"];
            write_strings(group, &roles, Some(&definitions), Some(&repetitions));
            write_strings(group, &["be kind", "hi", "hello", "2+2?", "4"], Some(&definitions), Some(&repetitions));
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.parquet");
        fs::write(&path, chat).unwrap();
        let mut lines = Vec::new();
        each_row(&path, |number, line| {
            lines.push((number, line.to_owned()));
            Ok(())
        })
        .unwrap();
        let first = r#"{"messages":[{"content":"be kind","role":"system"},{"content":"hi","role":"user"},{"content":"hello","role":"assistant"}]}"#;
        let second = r#"{"messages":[{"content":"2+2?","role":"user"},{"content":"4","role":"assistant"}]}"#;
        let json = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        assert_eq!(lines.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2]);
        assert_eq!([json(&lines[0].1), json(&lines[1].1)], [json(first), json(second)]);

        let schema = "message answers { required binary prompt (STRING); required binary completion (STRING); }";
        let answers = write(schema, Compression::SNAPPY, 1, |_, group| {
            write_strings(group, &["ab", "x"], None, None);
            write_strings(group, &["cd", "y"], None, None);
        });
        fs::write(&path, answers).unwrap();
        let jsonl = folder.path().join("answers.jsonl");
        fs::write(&jsonl, "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"prompt\":\"x\",\"completion\":\"y\"}\n")
            .unwrap();
        let options = DataOptions { vocabulary: VocabularyChoice::Bytes, ..DataOptions::default() };
        let [rows, lines] = [&path, &jsonl].map(|path| Dataset::examples(path, Format::Prompt, &options).unwrap());
        assert_eq!(rows.hash(), lines.hash());
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let refused = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            Corpus::read(&path).map(|corpus| corpus.documents().len()).map_err(|error| error.to_string())
        };
        let schema = "message other { required binary body (STRING); }";
        let other = write(schema, Compression::SNAPPY, 1, |_, group| write_strings(group, &["x"], None, None));
        let none = write("message texts { optional binary text (STRING); }", Compression::SNAPPY, 1, |_, group| {
            write_strings(group, &["x"], Some(&[1, 0]), None);
        });
        let whole = texts(Compression::SNAPPY);
        for (bytes, expected) in [
            (other, "its columns are body"),
            (none, "a.parquet, line 2: invalid type: null, expected a string"),
            (b"no such format".to_vec(), "a.parquet: Parquet error: Invalid Parquet file"),
            (whole[..whole.len() / 2].to_vec(), "a.parquet: "),
        ] {
            let error = refused(&bytes).unwrap_err();
            assert!(error.contains(expected), "{error} lacks {expected}");
        }
        // Any bit that is wrong gives texts or an error, no panic.
        for at in 0..whole.len() {
            for bit in [1, 0x80] {
                let mut damaged = whole.clone();
                damaged[at] ^= bit;
                let _either = refused(&damaged);
            }
        }
    }
}
