//! Runs the commands of README.md and of the pages in docs, as they are written there.
//!
//! Each page has its own folder, which contains the files that its commands name. The commands of a page run one after
//! another in a shell. Only the run files that `gapless init` has printed are changed, after they were read: to two
//! steps of a small model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use toml::{Table, Value};

use crate::folders::{byte_tokenizer, copy};

/// Commands that do not run here: a beginning of the command, and the reason.
const LEFT_OUT: [(&str, &str); 14] = [
    ("cargo run --release --example", "builds and trains an example in release mode"),
    ("cargo test", "runs these tests"),
    ("cargo bench", "measures times"),
    ("GAPLESS_EXPLORE=", "explores generated cases for a long time"),
    ("GAPLESS_SEED=", "runs these tests"),
    ("GAPLESS_DOUBLE_JUDGES=", "runs tests of GPU kernels"),
    ("GAPLESS_BINARIES=", "needs a GPU"),
    (".ci/", "runs all checks"),
    ("benches/gpu/", "needs a GPU"),
    ("python3 ", "needs PyTorch"),
    ("hf ", "needs the network"),
    ("pip install", "builds a Python package"),
    ("gapless report runs/run --watch", "serves until Ctrl-C; tests/commands/report.rs starts a server"),
    ("gapless train run.toml --set data.path=Cargo.lock", "reads the sources of all dependencies"),
];

/// A folder with the files that the commands of a page name.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
        let evidence = repository.join("tests/evidence/hf/lora/llama_qv");
        let text = "To be or not to be, that is the question.\n\nWhether it is nobler in the mind to suffer.\n\n";
        for name in ["text/a.txt", "text/b.md", "web/a.txt", "notes/one.txt", "book.txt", "TEXT"] {
            place.write(name, &text.repeat(60));
        }
        for name in ["SmolLM-135M", "SmolLM-135M-Instruct", "FOLDER", "base"] {
            copy(&evidence.join("base"), &place.path(name));
            place.write(&format!("{name}/tokenizer.json"), &byte_tokenizer().to_string());
            place.write(
                &format!("{name}/chat_template.jinja"),
                "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}\
                 {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            );
        }
        for name in ["my-adapter", "ADAPTER"] {
            copy(&evidence.join("adapter"), &place.path(name));
        }
        let message = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
        let line = format!(r#"{{"messages": [{}, {}]}}"#, message("user", "2 + 2?"), message("assistant", "4"));
        for name in ["conversations.jsonl", "held-out.jsonl"] {
            place.write(name, &format!("{line}\n").repeat(40));
        }
        let answer = |text: &str| format!("[{}]", message("assistant", text));
        let (prompt, chosen, rejected) = (message("user", "2 + 2?"), answer("4"), answer("5"));
        let line = format!(r#"{{"prompt": [{prompt}], "chosen": {chosen}, "rejected": {rejected}}}"#);
        place.write("preferences.jsonl", &format!("{line}\n").repeat(40));
        place.write("FILE.csv", "id,lower,upper,size\na,0,4,1024\nb,0,2,512\nc,2,4,512\n");
        place.write(
            "specs/llama-7b.toml",
            "model = \"gpt:vocabulary=64,layers=4,heads=2,width=32\"\nstep = { batch = 4, sequence = 16 }\n\
             mesh.pipeline = 2\n[vary]\nmicro_batches = [2, 4]\nschedule = [\"1f1b\", \"gpipe\"]\n",
        );
        fs::create_dir(place.path("bin")).unwrap();
        let program = env!("CARGO_BIN_EXE_gapless");
        place.program("gapless", &format!("exec '{program}' \"$@\""));
        let of_cargo = "cargo run --release --bin gapless --";
        place.program(
            "cargo",
            &format!(
                "case \"cargo $*\" in '{of_cargo} '*) shift 5; exec '{program}' \"$@\";; esac\necho \"cargo $*\" >&2; exit 99"
            ),
        );
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Writes a shell script that commands find by its name.
    fn program(&self, name: &str, script: &str) {
        self.write(&format!("bin/{name}"), &format!("#!/bin/sh\n{script}\n"));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(self.path(&format!("bin/{name}")), fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    /// Runs a command line as a user types it. It must succeed.
    fn run(&self, page: &str, line: &str) {
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).current_dir(self.folder.path()).env("PATH", path).stdin(Stdio::null());
        let output = shell.output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{page}: {line}\n{told}");
        if let Some((command, file)) = line.split_once(" > ")
            && command.contains(" init ")
            && let Some(file) = file.split_whitespace().next().filter(|file| file.ends_with(".toml"))
        {
            self.make_small(file);
        }
    }

    /// Reduces a printed run file to two steps of a small model.
    fn make_small(&self, file: &str) {
        let mut run: Table = toml::from_str(&fs::read_to_string(self.path(file)).unwrap()).unwrap();
        shrink(&mut run);
        fs::write(self.path(file), run.to_string()).unwrap();
    }
}

/// Reduces a run to two steps of a small model.
fn shrink(run: &mut Table) {
    let table = |value: &str| -> Value { Value::Table(toml::from_str(value).unwrap()) };
    run.insert("steps".into(), 2.into());
    run.insert("threads".into(), 1.into());
    run.insert("evaluation".into(), table("every = 0\nwindows = 1"));
    run.insert("checkpoints".into(), table("every = 0"));
    let mut set = |path: [&str; 2], value: Value| {
        if let Some(Value::Table(inner)) = run.get_mut(path[0]).filter(|inner| inner.get(path[1]).is_some()) {
            inner.insert(path[1].to_owned(), value);
        }
    };
    let llama = "layers = 4\nheads = 4\nkv_heads = 4\nwidth = 16\nhidden = 16";
    set(["model", "gpt"], table("layers = 1\nheads = 1\nwidth = 8"));
    set(["model", "llama"], table(llama));
    set(["model", "moe"], table(&format!("expert_hidden = 16\n[llama]\n{llama}\n[router]\nexperts = 8\ntop_k = 2")));
    set(["data", "vocabulary"], 256.into());
    set(["step", "batch"], 2.into());
    set(["step", "micro_batches"], 1.into());
    set(["step", "sequence"], 32.into());
    set(["sample", "tokens"], 4.into());
}

fn text_of(page: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap()
}

/// Returns the command lines of a page: those of its `sh` blocks, and of README also those in the text. A line that ends
/// with a backslash continues on the next.
fn commands(page: &str) -> Vec<String> {
    let text = text_of(page);
    let blocks = text.split("\n```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    let lines = blocks.flat_map(|block| {
        let joined = block.replace("\\\n", " ");
        joined.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    });
    let mut all: Vec<String> = lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    if page == "README.md" {
        let prose = text.split("\n```").step_by(2);
        let spans = prose.flat_map(|prose| prose.split('`').skip(1).step_by(2));
        all.extend(spans.filter(|span| span.starts_with("gapless ") && span.contains(" --")).map(str::to_owned));
    }
    all
}

/// Returns the reason why a command does not run here, or `None` if it does.
fn reason_to_leave_out(line: &str) -> Option<&'static str> {
    LEFT_OUT.iter().find(|(start, _)| line.starts_with(start)).map(|(_, reason)| *reason)
}

fn run_page(page: &str) {
    let lines: Vec<String> = commands(page).into_iter().filter(|line| reason_to_leave_out(line).is_none()).collect();
    assert!(!lines.is_empty(), "{page} has no commands that run here; take it out of PAGES");
    let place = Place::new();
    // Runs that the page names, but does not train.
    for (run, template) in [("run", "small-gpt"), ("tune", "sft")] {
        let contains = |text: &str| lines.iter().any(|line| line.contains(text));
        if contains(&format!("runs/{run} ")) && !contains(&format!(" train {run}.toml")) {
            place.run(page, &format!("gapless init {template} > {run}.toml"));
            place.run(page, &format!("gapless train {run}.toml"));
        }
    }
    lines.iter().for_each(|line| place.run(page, line));
}

macro_rules! pages {
    ($($name:ident = $page:literal),* $(,)?) => {
        /// Pages with commands that run here.
        const PAGES: &[&str] = &[$($page),*];
        $(#[cfg(unix)]
        #[test]
        fn $name() {
            run_page($page);
        })*
    };
}

pages! {
    readme = "README.md",
    fine_tuning = "docs/fine_tuning.md",
    generation = "docs/generation.md",
    gpu = "docs/gpu.md",
    hugging_face = "docs/hugging_face.md",
    optimizers = "docs/optimizers.md",
    pytorch = "docs/pytorch.md",
    recompute = "docs/recompute.md",
    runs = "docs/runs.md",
    tour = "docs/tour.md",
    weights_and_data = "docs/weights_and_data.md",
}

/// Returns every run file and part of one that the pages, `specs` and `gapless init` have, with where it is from.
#[cfg(all(target_os = "linux", feature = "cuda"))]
fn run_files() -> Vec<(String, Table)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = |folder: &str, extension: &str| {
        let entries = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == extension)).collect();
        files.sort();
        files.into_iter().map(|path| (path.display().to_string(), fs::read_to_string(&path).unwrap()))
    };
    let mut texts: Vec<(String, String)> =
        files("src/bin/gapless/presets", "toml").chain(files("specs", "toml")).collect();
    for (page, text) in files("docs", "md").chain([("README.md".to_owned(), text_of("README.md"))]) {
        let blocks = text.split("\n```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("toml\n"));
        texts.extend(blocks.map(|block| (format!("{page}: {block}"), block.to_owned())));
    }
    let parsed = texts.into_iter().map(|(from, text)| {
        let run = toml::from_str(&text).unwrap_or_else(|error| panic!("{from}: {error}"));
        (from, run)
    });
    parsed.filter(|(_, run): &(_, Table)| !run.contains_key("dependencies")).collect()
}

/// Every run file (by default one of three) trains on a simulated GPU, with a small model and few steps. A part of a run
/// file is put into a run of a mixture, and of a sweep all runs get the keys that it does not vary.
#[cfg(all(target_os = "linux", feature = "cuda"))]
#[test]
fn a_gpu_runs_every_run_file() {
    use gapless_testing::fake_driver::{BROKEN_RULE, compiler, use_fake_driver};
    if compiler().is_none() {
        return gapless_testing::not_checked("there is no C++ compiler");
    }
    let place = Place::new();
    let files = run_files();
    assert!(files.len() > 18, "{} run files were found", files.len());
    for (index, (from, run)) in gapless_testing::one_of_each(&files, 3).into_iter().enumerate() {
        let mut run = run.clone();
        ["vary", "skip", "menu", "sweep"].iter().for_each(|key| _ = run.remove(*key));
        if run.contains_key("trainable") {
            run.entry("model").or_insert_with(|| toml::from_str("folder = \"SmolLM-135M\"").unwrap());
        }
        if run.get("model").is_none_or(Value::is_str) {
            let is_llama = run.get("model").is_some_and(|model| model.as_str().unwrap().starts_with("llama"));
            run.insert("model".into(), toml::from_str(if is_llama { "[llama]" } else { "[moe]" }).unwrap());
        }
        let has_folder = run["model"].get("folder").is_some();
        let data = run.entry("data").or_insert_with(|| Table::new().into()).as_table_mut().unwrap();
        data.entry("path").or_insert_with(|| "text".into());
        if !has_folder {
            data.insert("vocabulary".into(), 256.into());
        }
        for source in data.get_mut("mix").and_then(Value::as_array_mut).into_iter().flatten() {
            source.as_table_mut().unwrap().insert("path".into(), "notes".into());
        }
        run.entry("step").or_insert_with(|| Table::new().into());
        let step = run["step"].as_table_mut().unwrap();
        ["batch", "micro_batches", "sequence"].iter().for_each(|key| _ = step.insert((*key).to_owned(), 1.into()));
        shrink(&mut run);
        if run.contains_key("mesh") {
            run["step"].as_table_mut().unwrap().insert("batch".into(), 8.into());
        }
        run.insert("device".into(), "cuda:0".into());
        place.write("run.toml", &run.to_string());
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapless"));
        command.args(["train", "run.toml", "--out", &format!("runs/{index}")]).current_dir(place.folder.path());
        use_fake_driver(&mut command);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !told.contains(BROKEN_RULE), "{from}\n{run}\n{told}");
        assert!(told.contains("the double of the driver was asked"), "{from} asks nothing of a GPU:\n{told}");
    }
}

/// Every page with commands is run, and every reason is needed.
#[test]
fn no_command_is_forgotten() {
    let docs = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")).unwrap();
    let names =
        docs.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(|name| name.ends_with(".md"));
    let pages = names.map(|name| format!("docs/{name}")).chain(["README.md", "CONTRIBUTING.md"].map(str::to_owned));
    let mut all = Vec::new();
    for page in pages {
        let lines = commands(&page);
        if !PAGES.contains(&page.as_str()) {
            let forgotten = lines.iter().find(|line| reason_to_leave_out(line).is_none());
            assert_eq!(forgotten, None, "{page} has commands; add it to PAGES");
        }
        all.extend(lines);
    }
    for (start, reason) in LEFT_OUT {
        assert!(all.iter().any(|line| line.starts_with(start)), "no command begins with {start:?} ({reason})");
    }
}
