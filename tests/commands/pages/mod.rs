//! Opens the HTML pages in a browser, light and dark, narrow and wide. Each page must open without an error and be
//! readable.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gapless_testing::{not_checked, slow_tests_enabled};
use serde_json::{Value, json};

/// The widths of windows, each with whether the color scheme is dark. No window of Chromium is narrower than 500.
const WINDOWS: [(u32, bool); 5] = [(1280, false), (1920, true), (500, false), (1280, true), (1920, false)];

fn gapless(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gapless")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the first browser that can be started, or `None` if there is none.
fn chromium() -> Option<&'static str> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        not_checked("there is no Chromium");
    }
    found
}

/// Opens a page, runs the script `act`, and checks conditions that hold for every page. Returns what the script
/// reports.
fn open(chromium: &str, page: &Path, (width, is_dark): (u32, bool), act: &str) -> Value {
    let name = format!("{} {width} {}", page.display(), if is_dark { "dark" } else { "light" });
    let folder = tempfile::tempdir().unwrap();
    let [judged, picture, profile] = ["page.html", "page.png", "profile"].map(|name| folder.path().join(name));
    let html = fs::read_to_string(page).unwrap();
    let script = format!("<script>{}\n{act}</script>", include_str!("judge.js"));
    fs::write(&judged, html.replacen("<!doctype html>", &format!("<!doctype html>{script}"), 1)).unwrap();

    let mut command = Command::new(chromium);
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]);
    // With virtual time, the browser's clock advances while the browser is idle, so timers take no real time.
    command.args(["--v=0", "--virtual-time-budget=8000", "--dump-dom"]).arg(format!("--window-size={width},1500"));
    command.arg(format!("--user-data-dir={}", profile.display()));
    command.arg(format!("--screenshot={}", picture.display()));
    if is_dark {
        command.arg("--blink-settings=preferredColorScheme=0");
    }
    let output = command.arg(format!("file://{}", judged.display())).output().unwrap();
    let [dom, log] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let console: Vec<&str> = log.lines().filter(|line| line.contains(":CONSOLE:")).collect();
    assert!(console.is_empty(), "{name}: {console:?}");
    let verdict = dom.split_once("data-verdict=\"").and_then(|(_, rest)| rest.split_once('"')).map(|(found, _)| found);
    let verdict = verdict.unwrap_or_else(|| panic!("{name}: no verdict: {log}"));
    let unescaped = verdict.replace("&quot;", "\"").replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", " ");
    let mut verdict: Value = serde_json::from_str(&unescaped.replace("&amp;", "&")).unwrap();
    assert_eq!(verdict["errors"], json!([]), "{name}");
    assert_eq!(verdict["faint"], json!([]), "{name}: text that is hard to read");
    assert_eq!(verdict["beyond"], json!(0), "{name}: wider than the window");
    assert_eq!(verdict["ground"].as_f64().unwrap() < 0.1, is_dark, "{name}");
    look(&picture, &name, is_dark);
    verdict["told"].take()
}

/// Checks that a screenshot is not blank, and is as light or dark as expected.
fn look(picture: &Path, name: &str, is_dark: bool) {
    if let Some(folder) = std::env::var_os("GAPLESS_SCREENSHOTS") {
        let file = PathBuf::from(name.replace(".html ", "-").replace(' ', "-"));
        fs::copy(picture, Path::new(&folder).join(file.file_name().unwrap()).with_extension("png")).unwrap();
    }
    let decoder = png::Decoder::new(std::io::BufReader::new(fs::File::open(picture).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let pixels: Vec<&[u8]> = pixels[..info.buffer_size()].chunks_exact(info.color_type.samples()).collect();
    let colors: BTreeSet<&[u8]> = pixels.iter().copied().collect();
    let ground = pixels[0];
    let drawn = pixels.iter().filter(|&&pixel| pixel != ground).count() as f64 / pixels.len() as f64;
    assert!(colors.len() > 50 && drawn > 0.03, "{name}: {} colors, {drawn:.3} drawn", colors.len());
    let brightness = |pixel: &&[u8]| pixel[..3].iter().map(|&channel| u64::from(channel)).sum::<u64>();
    let mean = pixels.iter().map(brightness).sum::<u64>() as f64 / (3 * 255 * pixels.len()) as f64;
    assert_eq!(mean < 0.35, is_dark, "{name}: {mean:.2} of white");
}

const TABLE: &str =
    "id,lower,upper,size\nw,0,9,3000000\na,1,4,5000000\nb,2,6,40000000\nc,4,8,5000000\nd,6,8,30000000\n";

const SWEEP: &str = r#"
[step]
model = "gpt:vocabulary=64,layers=4,heads=2,width=32"
batch = 8
sequence = 16
pipeline_ranks = 2
[vary]
schedule = ["1f1b", "gpipe"]
micro_batches = [2, 4]
[sweep]
allocators = ["bfc"]
"#;

/// Writes the folder of a run with 400 steps. The loss of step n is `first` + 1 / (n + 1).
fn run(folder: &Path, name: &str, first: f64, map: &Path) -> String {
    let path = folder.join(name);
    fs::create_dir(&path).unwrap();
    let mut rows = String::new();
    for step in 0..400 {
        let loss = if step == 300 { Value::Null } else { json!(first + 1.0 / f64::from(step + 1)) };
        let noise = f64::from(step * 7919 % 101) / 101.0;
        let row = json!({
            "step": step, "loss": loss, "gradient_norm": 1.0 + noise, "lr": 1e-3 * f64::from(400 - step) / 400.0,
            "tokens_per_second": 2600.0 + 10.0 * noise, "load": [noise, 1.0 - noise],
        });
        writeln!(rows, "{row}").unwrap();
        if step % 50 == 49 {
            writeln!(rows, "{}", json!({ "step": step, "val_loss": first + 0.1 })).unwrap();
        }
    }
    fs::write(path.join("metrics.jsonl"), rows + "{\"step\":400,\"lo").unwrap();
    fs::write(path.join("run.toml"), format!("steps = 400\n[learning_rate]\npeak = 1e-3\nfloor = {first:?}\n"))
        .unwrap();
    fs::write(path.join("samples.txt"), format!("=== step 200\nearly\n=== step 400\n<b>{name}</b> & so on\n")).unwrap();
    fs::write(path.join("summary.json"), "{\"gap\": 1.0, \"arena_bytes\": 73000000, \"signal\": null}").unwrap();
    fs::copy(map, path.join("memory.html")).unwrap();
    path.display().to_string()
}

#[test]
fn pages_open_in_a_browser() {
    let Some(chromium) = chromium().filter(|_| slow_tests_enabled()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [table, spec, map, compared, schedule, report] =
        ["step.csv", "sweep.toml", "map.html", "compared.html", "schedule.html", "report.html"].map(path);
    fs::write(&table, TABLE).unwrap();
    fs::write(&spec, SWEEP).unwrap();
    gapless(&["plan", &table, "--draw", &map]);
    gapless(&["compare", "--trace", &table, "--html", &compared, "--allocators", "gapless,bfc,pytorch"]);
    gapless(&["schedule", "zbv", "--ranks", "4", "--micro-batches", "8", "--out", &schedule]);
    gapless(&["sweep", &spec, "--out", &path("sweep"), "--threads", "1"]);
    let runs = [("first", 3.0), ("second", 2.5)].map(|(name, first)| run(folder.path(), name, first, map.as_ref()));
    gapless(&["report", &runs[0], &runs[1], "--out", &report]);

    let swept = path("swept.html");
    fs::copy(path("sweep/report.html"), &swept).unwrap();
    let pages = [&map, &compared, &schedule, &swept].map(|page| (page.clone(), "const act = () => null;"));
    let pages = [&pages[..], &[(report.clone(), include_str!("act.js"))]].concat();
    // Three pages are opened at a time. A browser takes a second for a page, but does not use a core all the time.
    for window in WINDOWS {
        for some in pages.chunks(3) {
            std::thread::scope(|scope| {
                for (page, act) in some {
                    scope.spawn(move || {
                        let told = open(chromium, page.as_ref(), window, act);
                        if !told.is_null() {
                            read_and_zoomed(&told);
                        }
                    });
                }
            });
        }
    }
}

/// Checks the report of `act.js`.
fn read_and_zoomed(told: &Value) {
    assert_eq!(told["runs"], json!(["first", "second"]));
    // The page shows two runs. If a curve is smoothed, its raw values are also shown. A list has one curve per
    // element.
    let curves = json!({ "chart-loss": 4, "chart-val_loss": 2, "chart-lr": 2, "chart-gradient_norm": 4,
        "chart-tokens_per_second": 2, "chart-load": 8 });
    assert_eq!(told["curves"], curves);
    // The middle of steps 0 to 399 is step 200, whose loss is `first` + 1 / 201.
    let tip = told["tip"].as_str().unwrap();
    assert!(["step 200", "first", "3.005", "second", "2.505"].iter().all(|word| tip.contains(word)), "{tip}");
    assert_eq!(told["crosses"], json!(6), "one in every chart");
    let labels = |value: &Value| -> Vec<f64> {
        let texts = value.as_array().unwrap().iter().filter_map(Value::as_str);
        texts.filter_map(|text| text.parse().ok()).filter(|&number| number >= 20.0).collect()
    };
    for zoomed in told["zoomed"].as_array().unwrap() {
        let labels = labels(zoomed);
        assert!(labels.len() > 2 && labels.iter().all(|step| (99.0..=200.0).contains(step)), "{zoomed}");
    }
    for key in ["selected", "is_other", "is_back", "tip_is_hidden", "is_logarithmic", "map"] {
        assert_eq!(told[key], json!(true), "{key}");
    }
    assert_eq!([&told["without_first"], &told["unsmoothed"], &told["lost"]], [&json!(2), &json!(2), &json!(2)]);
    assert_eq!(told["differing"], json!(["learning_rate.floor"]));
    assert_eq!(told["samples"], json!(["<b>first</b> & so on", "<b>second</b> & so on"]));
}
