//! The arguments that describe a run: the run file, `--set`, and one flag for each common key. Such a flag is a short
//! form of `--set`.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::{Context, ensure};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use gapless::run::{NAMES, RunConfig};
use gapless::step::Step;
use serde_json::Value;

use crate::output::tell;

/// Keys that override those of the run file.
#[derive(Debug, Clone, Default)]
pub struct RunArguments {
    /// The run file of the hidden flag `--step`.
    file: Option<PathBuf>,
    /// A table that is the schedule of the step.
    pub table: Option<PathBuf>,
    assignments: Vec<String>,
}

/// A flag that sets a key.
struct Flag {
    name: &'static str,
    key: &'static str,
    long: String,
    help: String,
    is_list: bool,
}

static FLAGS: LazyLock<Vec<Flag>> = LazyLock::new(|| {
    let schema = RunConfig::schema();
    let flag = |&(name, key): &(&'static str, &'static str)| {
        let described = key.split('.').try_fold(&schema, |at, part| property(&schema, at, part));
        let described_field = |field: &str| described.map_or(&Value::Null, |it| &it[field]);
        let mut help = described_field("description").as_str().unwrap_or_default().replace('\n', " ");
        match name {
            "lora" => help += " RANK:ALPHA sets alpha too.",
            "train" => help += "Patterns of the parameters to train; all others stay as they are.",
            _ => help += &values(&schema, described),
        }
        let is_list = described_field("type") == "array" || key == "trainable.only";
        Flag { name, key, long: name.replace('_', "-"), help: format!("{help} [{key}]"), is_list }
    };
    NAMES.iter().map(flag).collect()
});

/// Returns a sentence for a key's help text that lists the words that the key allows. Returns an empty text if the key
/// also allows other values.
fn values(root: &Value, described: Option<&Value>) -> String {
    let named = described.and_then(|it| it["$ref"].as_str()).and_then(|name| root.pointer(name.strip_prefix('#')?));
    let all = named.and_then(|it| it["oneOf"].as_array()).into_iter().flatten();
    let words: Vec<&str> = all.filter_map(|one| one["const"].as_str()).collect();
    if words.is_empty() { String::new() } else { format!(" One of {}.", words.join(", ")) }
}

/// Finds the schema of a key in the schema `at` of a table. References and alternatives are followed. Returns `None` if
/// the table has no such key.
fn property<'a>(root: &'a Value, at: &'a Value, key: &str) -> Option<&'a Value> {
    if let Some(found) = at["properties"].get(key) {
        return Some(found);
    }
    let named = at["$ref"].as_str().and_then(|name| root.pointer(name.strip_prefix('#')?));
    let several = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| at[key].as_array()).flatten();
    named.into_iter().chain(several).find_map(|below| property(root, below, key))
}

impl clap::Args for RunArguments {
    fn augment_args(command: Command) -> Command {
        let set =
            Arg::new("set").long("set").value_name("KEY=VALUE").action(ArgAction::Append).allow_hyphen_values(true);
        let set = set.help(
            "Set a key of the run, e.g. step.batch=16 (docs/run_file.md lists the keys); can be given several times",
        );
        let file =
            Arg::new("step").long("step").value_name("FILE.toml").value_parser(value_parser!(PathBuf)).hide(true);
        let table = Arg::new("table").long("table").value_name("FILE.csv").value_parser(value_parser!(PathBuf)).help(
            "A table of your own as the schedule of the step: PyTorch's CSV, one row per rank [pipeline.schedule]",
        );
        let command = command.arg(set).arg(file).arg(table).next_help_heading("Common keys of the run");
        let command = FLAGS.iter().fold(command, |command, flag| {
            let arg = Arg::new(flag.name).long(flag.long.as_str()).value_name("VALUE").allow_hyphen_values(true);
            let arg = match flag.name {
                "precision" => arg.alias("dtype"),
                "device" => arg.alias("kernels"),
                "profile" => arg.alias("card"),
                _ => arg,
            };
            command.arg(arg.help(flag.help.as_str()))
        });
        command.next_help_heading(None)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for RunArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut arguments = Self::default();
        arguments.update_from_arg_matches(matches)?;
        Ok(arguments)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one::<PathBuf>("step").cloned();
        self.table = matches.get_one::<PathBuf>("table").cloned();
        for flag in FLAGS.iter() {
            let Some(value) = matches.get_one::<String>(flag.name) else { continue };
            match value.split_once(':').filter(|_| flag.name == "lora") {
                Some((rank, alpha)) => {
                    let assignment = |key, value| format!("trainable.lora.{key}={value}");
                    self.assignments.extend([assignment("rank", rank), assignment("alpha", alpha)]);
                }
                None if flag.is_list => {
                    let items: Vec<String> = value.split(',').map(|item| Value::from(item).to_string()).collect();
                    self.assignments.push(format!("{}=[{}]", flag.key, items.join(", ")));
                }
                None => self.assignments.push(format!("{}={value}", flag.key)),
            }
        }
        self.assignments.extend(matches.get_many::<String>("set").into_iter().flatten().cloned());
        Ok(())
    }
}

impl RunArguments {
    /// True if no flag and no assignment is given.
    pub fn is_empty(&self) -> bool {
        self.table.is_none() && !self.has_keys()
    }

    /// True if anything but a table is given.
    pub fn has_keys(&self) -> bool {
        self.file.is_some() || !self.assignments.is_empty()
    }

    /// True if a flag or an assignment sets the key with this short name.
    pub fn has(&self, name: &str) -> bool {
        let key = NAMES.iter().find(|(short, _)| *short == name).map_or(name, |(_, key)| key);
        let is_assigned =
            |text: &String| text.split('=').next().is_some_and(|assigned| [name, key].contains(&assigned.trim()));
        self.assignments.iter().any(is_assigned)
    }

    /// Sets a key, unless a flag or an assignment already sets it.
    pub fn assign(&mut self, key: &str, value: &str) {
        self.assignments.insert(0, format!("{key}={value}"));
    }

    /// Reads the run from a file with the flags applied. Without a file, the flags must describe the whole run.
    pub fn run(&self, file: Option<&Path>) -> anyhow::Result<RunConfig> {
        let mut assignments = self.assignments.clone();
        if let Some(path) = &self.table {
            ensure!(!self.has("schedule"), "--table is the schedule; leave --schedule out");
            assignments.push(assigned_table(path)?);
        }
        let run = RunConfig::read_without_data(file.or(self.file.as_deref()), &assignments)?;
        run.notices.iter().for_each(tell);
        Ok(run)
    }

    /// Returns the run that the flags describe. Constraints between keys are not checked.
    pub fn unchecked(&self) -> anyhow::Result<RunConfig> {
        Ok(RunConfig::parse("", &self.assignments)?)
    }

    /// Reads the run and returns its training step.
    pub fn step(&self, file: Option<&Path>) -> anyhow::Result<Step> {
        Ok(Step::new(&self.run(file)?)?)
    }

    /// True if a file or a model is given.
    pub fn names_a_run(&self, file: Option<&Path>) -> bool {
        file.is_some() || self.file.is_some() || self.has("model")
    }
}

/// Returns the assignment that makes a table the schedule of a step.
pub fn assigned_table(path: &Path) -> anyhow::Result<String> {
    let path = path.to_str().context("the path of --table is not UTF-8")?;
    ensure!(path.ends_with(".csv"), "{path} is not the path of a table for a model; its name must end in .csv");
    Ok(format!("pipeline.schedule={path}"))
}

/// True if the file's extension is that of a run file.
pub fn is_run(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"))
}
