//! Generates docs/run_file.md, which lists every key of a run file, from the types. `GAPLESS_RECORD=1` rewrites the
//! page.

use std::collections::BTreeSet;
use std::fmt::Write;

use gapless::run::RunConfig;
use serde_json::Value;

const HEAD: &str = "\
# Every key of a run's file

`GAPLESS_RECORD=1 cargo test --test run_file reference` generates this page from the types that read a run file; [runs.md](runs.md)
introduces runs. `gapless init schema` prints the same keys as a JSON schema. Editors use it to complete and check keys: Even Better TOML
and Taplo do so if the first line of the file is `#:schema run.schema.json`. A key without a default that is not optional is required if
its table is present.
";

struct Reference {
    schema: Value,
    page: String,
    /// Names of the types that have a table already.
    done: BTreeSet<String>,
}

impl Reference {
    /// Resolves the references of a value. Returns the value that the last one points to, and the name of the value's
    /// type. Of several alternatives, takes the one that is not null.
    fn resolved<'a>(&'a self, mut value: &'a Value) -> (&'a Value, Option<&'a str>) {
        if let Some(any) = value["anyOf"].as_array() {
            value = any.iter().find(|one| one["type"] != "null").expect("not null alone");
        }
        match value["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
            Some(name) => (&self.schema["$defs"][name], Some(name)),
            None => (value, None),
        }
    }

    /// Writes the table of a type, followed by the tables below it.
    fn table(&mut self, path: &str, value: &Value) {
        let properties = value["properties"].as_object().expect("a table has keys").clone();
        let mut below = Vec::new();
        let mut rows = String::new();
        for (key, property) in &properties {
            let path = [path, key].iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join(".");
            let is_optional = property["anyOf"].is_array() || self.type_of(property).contains("null");
            let default = match &property["default"] {
                Value::Object(_) => String::new(),
                Value::Null if is_optional => "optional".to_owned(),
                Value::Null => String::new(),
                // Printed as an f32, because conversion to f64 would add digits.
                Value::Number(number) if property["format"] == "float" => {
                    format!("`{}`", number.as_f64().expect("a number") as f32)
                }
                default => format!("`{default}`"),
            };
            let (resolved, name) = self.resolved(property);
            let mut meaning = text(&property["description"]);
            let kind = if resolved["properties"].is_object() {
                below.push((path.clone(), resolved.clone(), name.map(str::to_owned)));
                format!("[table](#{})", anchor(&path))
            } else if let Some(words) = self.resolved(&resolved["items"]).0["oneOf"].as_array() {
                meaning += &self.variants(&path, words, &mut below);
                "array of these".to_owned()
            } else if let (items, Some(name)) = self.resolved(&resolved["items"]) {
                below.push((path.clone(), items.clone(), Some(name.to_owned())));
                format!("array of [tables](#{})", anchor(&path))
            } else if let Some(variants) = resolved["oneOf"].as_array() {
                meaning += &self.variants(&path, variants, &mut below);
                "one of".to_owned()
            } else {
                self.type_of(property).replace(" or null", "")
            };
            writeln!(rows, "| `{key}` | {kind} | {default} | {meaning} |").unwrap();
        }
        write!(self.page, "\n| key | type | default | |\n|---|---|---|---|\n{rows}").unwrap();
        for (path, value, name) in below {
            write!(self.page, "\n## {path}\n").unwrap();
            match name {
                Some(name) if !self.done.insert(name.clone()) => {
                    let first =
                        if name == "LlamaConfig" { "model.llama" } else { unreachable!("{name} is there twice") };
                    write!(self.page, "\nThe keys of [{first}](#{}).\n", anchor(first)).unwrap();
                }
                _ => self.table(&path, &value),
            }
        }
    }

    /// Lists the meaning of each variant. Variants with keys get a table below.
    fn variants(&self, path: &str, all: &[Value], below: &mut Vec<(String, Value, Option<String>)>) -> String {
        let mut said = String::new();
        for variant in all {
            let (word, kind) = match variant["properties"].as_object().and_then(|one| one.iter().next()) {
                None => (variant["const"].as_str().expect("a word").to_owned(), String::new()),
                Some((word, value)) => {
                    let (resolved, name) = self.resolved(value);
                    let path = format!("{path}.{word}");
                    let kind = if resolved["properties"].is_object() {
                        let kind = format!(" ([table](#{}))", anchor(&path));
                        below.push((path, resolved.clone(), name.map(str::to_owned)));
                        kind
                    } else {
                        format!(" ({})", self.type_of(value))
                    };
                    (word.clone(), kind)
                }
            };
            let meaning = text(&variant["description"]);
            write!(said, "<br>`{word}`{kind}{}{meaning}", if meaning.is_empty() { "" } else { ": " }).unwrap();
        }
        said
    }

    fn type_of(&self, value: &Value) -> String {
        match &value["type"] {
            Value::String(name) if name == "array" => format!("array of {}s", self.type_of(&value["items"])),
            Value::String(name) => name.clone(),
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
            _ => String::new(),
        }
    }
}

/// The anchor of a heading.
fn anchor(heading: &str) -> String {
    heading.replace('.', "")
}

/// Returns a doc comment as one line, with links into the code replaced by plain names.
fn text(description: &Value) -> String {
    let mut rest = description.as_str().unwrap_or_default().replace('\n', " ").replace('|', "\\|");
    while let Some((before, link)) = rest.split_once("[`") {
        let (name, behind) = link.split_once("`]").expect("a link ends");
        let behind = match behind.strip_prefix('(').and_then(|target| target.split_once(')')) {
            Some((_, behind)) => behind,
            None => behind,
        };
        rest = format!("{before}`{name}`{behind}");
    }
    rest
}

#[test]
fn the_reference_is_that_of_the_types() {
    let schema = RunConfig::schema();
    let root = schema.clone();
    let mut reference = Reference { schema, page: HEAD.to_owned(), done: BTreeSet::new() };
    reference.table("", &root);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/run_file.md");
    if std::env::var_os("GAPLESS_RECORD").is_some() {
        std::fs::write(path, &reference.page).expect("the page is writable");
    }
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page == reference.page, "docs/run_file.md is not what the types say: GAPLESS_RECORD=1 writes it anew");
}

/// The schema accepts the same keys as the parser, in complete files and in wrong ones.
#[test]
fn the_schema_names_the_keys_that_are_read() {
    let schema = RunConfig::schema();
    for (name, object) in [
        ("", &schema),
        ("data.", &schema["$defs"]["DataConfig"]),
        ("step.", &schema["$defs"]["StepOptions"]),
        ("memory.", &schema["$defs"]["MemoryOptions"]),
    ] {
        assert_eq!(object["additionalProperties"], false);
        let wrong = format!("{name}nonsense=1");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, "[model.gpt]\n[data]\npath = \"x\"\n").unwrap();
        let error = RunConfig::read(&path, &[wrong]).unwrap_err().to_string();
        for key in object["properties"].as_object().unwrap().keys() {
            assert!(error.contains(&format!("`{key}`")), "{key} is in the schema, but: {error}");
        }
    }
}
