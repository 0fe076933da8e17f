//! Rows of Parquet files.
//!
//! In: a path. Out: each row as an equivalent line of a .jsonl file. Columns that no format reads are not decoded, and
//! the file is never in memory as a whole.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

use crate::DataError;

/// All columns that any [`Format`](crate::Format) reads.
const COLUMNS: [&str; 7] = ["text", "prompt", "completion", "response", "messages", "chosen", "rejected"];

/// Visits the rows with their numbers, counted from 1.
///
/// # Errors
/// Returns an error if the file cannot be read or is damaged, if it has none of [`COLUMNS`], or if the visitor returns
/// an error.
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

/// The rows of a file, restricted to the columns that are read.
fn rows(file: File) -> ParquetResult<RowIter<'static>> {
    let reader = SerializedFileReader::new(file)?;
    let schema = reader.metadata().file_metadata().schema();
    let read = |column: &&Arc<Type>| COLUMNS.contains(&column.name());
    let columns: Vec<Arc<Type>> = schema.get_fields().iter().filter(read).cloned().collect();
    if columns.is_empty() {
        let there: Vec<&str> = schema.get_fields().iter().map(|column| column.name()).collect();
        return Err(ParquetError::General(format!("it has the columns {}", there.join(", "))));
    }
    let columns = Type::group_type_builder(schema.name()).with_fields(columns).build()?;
    RowIter::from_file_into(Box::new(reader)).project(Some(columns))
}

/// Calls the library, and turns panics into errors, because the library panics on some damaged files.
fn guarded<T>(path: &Path, call: impl FnOnce() -> ParquetResult<T>) -> Result<T, DataError> {
    let fail = |reason: String| DataError::Parquet { path: path.to_owned(), reason };
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => answer.map_err(|error| fail(error.to_string())),
        Err(_panic) => Err(fail("its parts contradict each other".into())),
    }
}
