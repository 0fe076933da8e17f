//! Rows of Parquet files are equivalent to lines of .jsonl files.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use gapless_data::{Corpus, DataOptions, Dataset, Format, Source, Vocabulary, VocabularyChoice};
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

/// Writes a Parquet file. Each call of `group` writes one row group.
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

/// A file of two row groups. It has a column of texts, and an id column that is not read.
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
        // The file is read as part of a folder, and streamed.
        let dataset = Dataset::prepare(&Source::Path(folder.path().to_owned()), &options).unwrap();
        assert_eq!(dataset.corpus().unwrap().hash, expected);
    }
}

/// Checks that examples in a Parquet file equal those in the same lines of .jsonl.
fn same_examples(format: Format, vocabulary: VocabularyChoice, rows: &[u8], lines: &str, folder: &Path) {
    let options = DataOptions { vocabulary, ..DataOptions::default() };
    let hash = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        Dataset::examples(&path, format, &options).unwrap().hash().to_owned()
    };
    assert_eq!(hash("examples.parquet", rows), hash("examples.jsonl", lines.as_bytes()));
}

#[test]
fn answers_are_examples() {
    let schema = "message answers { required binary prompt (STRING); required binary completion (STRING); }";
    let rows = write(schema, Compression::SNAPPY, 1, |_, group| {
        write_strings(group, &["ab", "x"], None, None);
        write_strings(group, &["cd", "y"], None, None);
    });
    let lines = r#"{"prompt": "ab", "completion": "cd"}
{"prompt": "x", "completion": "y"}"#;
    let folder = tempfile::tempdir().unwrap();
    same_examples(Format::Prompt, VocabularyChoice::Bytes, &rows, lines, folder.path());
}

#[test]
fn pairs_of_answers_are_examples() {
    let schema = "message pairs { optional binary prompt (STRING); required binary chosen (STRING); required binary rejected (STRING); }";
    let rows = write(schema, Compression::SNAPPY, 1, |_, group| {
        write_strings(group, &["ab"], Some(&[1, 0]), None);
        write_strings(group, &["cd", "x y"], None, None);
        write_strings(group, &["e", "x z"], None, None);
    });
    let lines = r#"{"prompt": "ab", "chosen": "cd", "rejected": "e"}
{"prompt": "x", "chosen": " y", "rejected": " z"}"#;
    let folder = tempfile::tempdir().unwrap();
    same_examples(Format::Preference, VocabularyChoice::Bytes, &rows, lines, folder.path());
}

#[test]
fn conversations_are_examples() {
    let schema = "message chat { optional group messages (LIST) { repeated group list { optional group element {
        required binary role (STRING); required binary content (STRING); } } } }";
    let rows = write(schema, Compression::SNAPPY, 1, |_, group| {
        // One conversation of three messages, one of two.
        let (definitions, repetitions) = ([3; 5], [0, 1, 1, 0, 1]);
        let roles = ["system", "user", "assistant", "user", "assistant"];
        write_strings(group, &roles, Some(&definitions), Some(&repetitions));
        write_strings(group, &["be kind", "hi", "hello", "2+2?", "4"], Some(&definitions), Some(&repetitions));
    });
    let lines = r#"{"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}"#;
    let folder = tempfile::tempdir().unwrap();
    let vocabulary = folder.path().join("tokenizer.json");
    Vocabulary::train(["be kind, hello"].into_iter(), 260).unwrap().save(&vocabulary).unwrap();
    let template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}";
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    same_examples(Format::Chat, VocabularyChoice::File(vocabulary), &rows, lines, folder.path());
}

#[test]
fn unreadable_parquet_files_are_refused() {
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
        (other, "it has the columns body"),
        (none, "a.parquet, line 2: invalid type: null, expected a string"),
        (b"no such format".to_vec(), "a.parquet: Parquet error: Invalid Parquet file"),
        (whole[..whole.len() / 2].to_vec(), "a.parquet: "),
    ] {
        let error = refused(&bytes).unwrap_err();
        assert!(error.contains(expected), "{error} lacks {expected}");
    }
    // Flipping any bit must give texts or an error, never a panic.
    for at in 0..whole.len() {
        for bit in [1, 0x80] {
            let mut damaged = whole.clone();
            damaged[at] ^= bit;
            let _either = refused(&damaged);
        }
    }
}
