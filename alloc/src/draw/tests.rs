//! Draws one small training step in every form, then generated problems.

use gapless_testing::prelude::*;
use insta::assert_snapshot;

use super::*;
use crate::{Buffer, Role};

fn label(tensor: &str, op: &str, layer: &str, role: Role) -> Label {
    Label { tensor: tensor.into(), op: op.into(), layer: layer.into(), role }
}

/// Two layers forward, backward and updated: `(problem, labels, marks)`.
fn step() -> (Problem, Vec<Label>, Vec<Mark>) {
    let table = [
        (0..24, 96, label("h.0.weight", "variable", "h.0", Role::Parameter)),
        (0..24, 96, label("h.1.weight", "variable", "h.1", Role::Parameter)),
        (0..24, 192, label("adam.moments", "variable", "", Role::OptimizerState)),
        (16..24, 96, label("h.0.weight.grad", "matmul", "h.0", Role::Gradient)),
        (12..24, 96, label("h.1.weight.grad", "matmul", "h.1", Role::Gradient)),
        (0..18, 64, label("tokens", "input", "", Role::Input)),
        (2..16, 256, label("h.0", "linear", "h.0", Role::Activation)),
        (4..12, 256, label("h.1", "linear", "h.1", Role::Activation)),
        (8..10, 32, label("loss.scratch", "softmax", "", Role::Workspace)),
        (10..14, 128, label("h.1.grad", "matmul", "h.1", Role::Activation)),
    ];
    let labels = table.iter().map(|(_, _, label)| label.clone()).collect();
    let buffers = table.into_iter().map(|(ticks, kib, _)| Buffer::new(ticks, kib << 10)).collect();
    let marks = vec![Mark::new(0..10, "forward 0"), Mark::new(10..20, "backward 0"), Mark::new(20..24, "update")];
    (Problem::new(buffers).unwrap(), labels, marks)
}

fn with_step<T>(look: impl FnOnce(&MemoryMap<'_>) -> T) -> T {
    let (problem, labels, marks) = step();
    // The plan is written down here, so that the snapshots don't change when the planner finds better plans.
    let kib = [832, 928, 512, 704, 256, 1024, 0, 256, 704, 704];
    let offsets = kib.map(|kib| kib << 10);
    crate::check(&problem, &offsets, None).unwrap();
    look(&MemoryMap::new("two layers", &problem, &offsets, &labels).unwrap().with_marks(&marks).unwrap())
}

#[test]
fn text_of_a_small_step() {
    let options = TextOptions { columns: 84, rows: 22, colour: false };
    assert_snapshot!(with_step(|map| map.text(&options)), @r##"
    two layers  1.06 MiB high, bound 1.06 MiB, gap 1.0000
                ▏forward 0                    ▏backward 0                   ▏update
      1.06 MiB ┤iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii··················
               │PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP
               │PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP
               │······························aaaaaaaaaaaa······gggggggggggggggggggggggg
               │OOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOO
               │OOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOO
               │············aaaaaaaaaaaaaaaaaaaaaaaa····································
               │············aaaaaaaaaaaaaaaaaaaaaaaagggggggggggggggggggggggggggggggggggg
               │······aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa························
               │······aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa························
               │······aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa························
           0 B └────────────────────────────────────────────────────────────────────────
      1.06 MiB ┤╌ lower bound, live bytes below ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
               │            ▃▃▃▃▃▃▃▃▃▃▃▃▄▄▄▄▄▄██████▂▂▂▂▂▂
               │      ▂▂▂▂▂▂██████████████████████████████▅▅▅▅▅▅
               │      ████████████████████████████████████████████████▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅
               │████████████████████████████████████████████████████████████████████████
               │████████████████████████████████████████████████████████████████████████
           0 B └────────────────────────────────────────────────────────────────────────
                tick 0                                                                24
    P persistent parameter ×2  g gradient ×2  O persistent optimizer state ×1
    i input ×1  a activation ×3  w workspace ×1  · free
    "##);
}

#[test]
fn summary_of_a_small_step() {
    assert_snapshot!(with_step(|map| map.summary(5)), @r##"
    two layers
      buffers      10 over ticks 0..24
      height       1.06 MiB (1114112 bytes)
      lower bound  1.06 MiB (1114112 bytes)
      gap          1.000000 (0 bytes above the bound)

    by role at peak tick 10             bytes    share  tensors    persistent
      parameter                      192 KiB    17.6%        2       192 KiB
      optimizer state                192 KiB    17.6%        1       192 KiB
      input                           64 KiB     5.9%        1           0 B
      activation                     640 KiB    58.8%        3           0 B

    largest at peak tick 10
         256 KiB  h.0           linear    h.0  activation       at 0 for 2..16
         256 KiB  h.1           linear    h.1  activation       at 262144 for 4..12
         192 KiB  adam.moments  variable       optimizer state  at 524288 for 0..24
         128 KiB  h.1.grad      matmul    h.1  activation       at 720896 for 10..14
          96 KiB  h.0.weight    variable  h.0  parameter        at 851968 for 0..24

    unused over time, of 1.06 MiB
      mean 317.33 KiB (29.2%), least 0 B, most 640 KiB
      ▅▅▃▃▁▁▁▁▁▁▁▁▂▂▃▃▄▄▄▄▄▄▄▄  mean of each of 24 spans, full bar: the height
    "##);
}

#[test]
fn svg_of_two_buffers() {
    let problem = Problem::new(vec![Buffer::new(0..4, 1024), Buffer::new(1..3, 512)]).unwrap();
    let labels = [label("a < b", "op & op", "", Role::Parameter), label("x", "add", "h.0", Role::Activation)];
    let marks = [Mark::new(0..2, "forward 0")];
    let map = MemoryMap::new("\"two\"", &problem, &[0, 1024], &labels).unwrap().with_marks(&marks).unwrap();
    let svg = map.svg(&SvgOptions { width: 400, height: 340 });
    let body = svg.split_once("</style>\n").unwrap().1;
    assert_snapshot!(body, @r##"
    <rect class="ground" width="400" height="340"/>
    <text class="title" x="84" y="26">&quot;two&quot;</text>
    <text x="84" y="44">height 1.50 KiB · lower bound 1.50 KiB · gap 1.0000 · 2 buffers</text>
    <g class="phase"><title>forward 0 [0, 2)</title><path d="M84.00 68.00H234.00"/><path d="M84.00 54.00V284.00"/><text x="88.00" y="64.00">forward 0</text></g>
    <rect class="free" x="84" y="72" width="300.00" height="116.00"/>
    <g class="buffer parameter">
    <rect x="84.00" y="110.67" width="300.00" height="77.33"><title>a &lt; b
    op &amp; op
    persistent parameter
    1 KiB (1024 bytes) at 0
    ticks [0, 4)</title></rect>
    <path class="hatch" d="M84.00 110.67h300.00v77.33h-300.00z"/>
    <text x="89.00" y="152.83">a &lt; b</text>
    </g>
    <g class="buffer activation">
    <rect x="159.00" y="72.00" width="150.00" height="38.67"><title>x
    add in h.0
    activation
    512 B (512 bytes) at 1024
    ticks [1, 3)</title></rect>
    <text x="164.00" y="94.83">x</text>
    </g>
    <path class="axis" d="M79.00 188.00h5"/>
    <text class="size" x="76.00" y="192.00">0 B</text>
    <path class="axis" d="M79.00 149.33h5"/>
    <text class="size" x="76.00" y="153.33">512 B</text>
    <path class="axis" d="M79.00 110.67h5"/>
    <text class="size" x="76.00" y="114.67">1 KiB</text>
    <path class="axis" d="M79.00 72.00h5"/>
    <text class="size" x="76.00" y="76.00">1.50 KiB</text>
    <text x="84" y="298.00">tick 0</text>
    <text class="size" x="384.00" y="298.00">4</text>
    <path class="live" d="M84.00 284.00H84.00V230.67H159.00V204.00H309.00V230.67H384.00V284.00z"/>
    <path class="height" d="M84.00 204.00H384.00"/>
    <path class="bound" d="M84.00 204.00H384.00"/>
    <text class="size" x="76.00" y="214.00">live bytes</text>
    <rect class="parameter" x="84.00" y="316.00" width="11" height="11"/>
    <text x="100.00" y="326.00">parameter</text>
    <rect class="activation" x="181.00" y="316.00" width="11" height="11"/>
    <text x="197.00" y="326.00">activation</text>
    <rect class="swatch" x="285.00" y="316.00" width="11" height="11"/>
    <path class="hatch" d="M285.00 316.00h11v11h-11z"/>
    <text x="301.00" y="326.00">hatched: alive at every tick</text>
    </svg>
    "##);
}

#[test]
fn an_empty_problem_has_pictures_too() {
    let problem = Problem::default();
    let map = MemoryMap::new("nothing", &problem, &[], &[]).unwrap();
    check_pictures(&map);
    assert_eq!(map.summary(5).peak_tick, None);
    assert!(map.text(&TextOptions::default()).starts_with("nothing  0 B high"));
}

/// If there are few ticks, the sweep for the lower bound starts at tick 0. Ticks before the first buffer must not be
/// drawn.
#[test]
fn a_step_that_starts_late_has_pictures_too() {
    let problem = Problem::new(vec![Buffer::new(1..2, 0), Buffer::new(2..3, 8)]).unwrap();
    let labels = vec![label("a", "", "", Role::Input); 2];
    check_pictures(&MemoryMap::new("late", &problem, &[0, 0], &labels).unwrap());
}

/// The page fetches nothing, and shows names as text only.
#[test]
fn the_page_stands_alone() {
    let problem = Problem::default();
    let html = MemoryMap::new("", &problem, &[], &[]).unwrap().html();
    for door in
        ["http:", "https:", "//cdn", "src=", "href=", "@import", "url(", "fetch(", "innerHTML", "outerHTML", "eval("]
    {
        assert!(!html.contains(door), "{door}");
    }
}

#[test]
fn refuses_what_cannot_be_drawn() {
    let problem = Problem::new(vec![Buffer::new(0..1, 8)]).unwrap();
    let labels = [label("x", "", "", Role::Input)];
    let check = |result: Result<MemoryMap<'_>, Error>, expected: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(MemoryMap::new("", &problem, &[], &labels), "0 offsets for 1 buffers");
    check(MemoryMap::new("", &problem, &[0], &[]), "0 labels for 1 buffers");
    check(MemoryMap::new("", &problem, &[u64::MAX], &labels), "end past the address space");
    let marks = [Mark::new(3..3, "update")];
    check(MemoryMap::new("", &problem, &[0], &labels).unwrap().with_marks(&marks), "mark \"update\": ticks [3, 3)");
}

#[test]
fn unused_bytes_add_up_to_the_area_that_no_rectangle_covers() {
    with_step(|map| {
        let summary = map.summary(0);
        let covered: u64 = map.rectangles().map(|r| r.bytes * (r.ticks.end - r.ticks.start)).sum();
        let ticks = map.ticks.end - map.ticks.start;
        assert_eq!(summary.unused.mean_bytes, (map.height * ticks - covered) / ticks);
        // 24 ticks in 24 spans: each span is one tick, and its live bytes can be counted by hand.
        for span in &summary.spans {
            let live: u64 = crate::live_at(map.problem, span.ticks.start).map(|id| map.problem.buffer(id).bytes).sum();
            assert_eq!((span.most_live_bytes, span.mean_unused_bytes), (live, map.height - live));
        }
    });
}

/// Parses every picture of `map` with parsers that share no code with the writers.
fn check_pictures(map: &MemoryMap<'_>) {
    check_text(map);
    check_svg(map);
    check_html(map);
    let summary = map.summary(usize::MAX);
    let again: Summary = serde_json::from_str(&serde_json::to_string(&summary).unwrap()).unwrap();
    // serde_json reads the last digit of a float to within one unit unless its slower exact mode is on.
    assert!((again.gap - summary.gap).abs() <= 4.0 * f64::EPSILON * summary.gap);
    assert!(again == Summary { gap: again.gap, ..summary.clone() });
    assert_eq!(summary.roles.iter().map(|r| r.bytes).sum::<u64>(), summary.lower_bound_bytes);
    assert_eq!(summary.largest.iter().map(|t| t.bytes).sum::<u64>(), summary.lower_bound_bytes);
    assert!(summary.gap.is_finite());
}

fn check_text(map: &MemoryMap<'_>) {
    let text = map.text(&TextOptions { columns: 60, rows: 16, colour: false });
    for line in text.lines() {
        assert!(line.chars().count() <= 62, "{line:?}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
    assert!(text.lines().count() >= 16);
}

fn check_svg(map: &MemoryMap<'_>) {
    let svg = map.svg(&SvgOptions { width: 640, height: 480 });
    assert_eq!(svg, map.svg(&SvgOptions { width: 640, height: 480 }));
    let document = roxmltree::Document::parse(&svg).unwrap();
    let is_buffer = |n: &roxmltree::Node<'_, '_>| {
        n.has_tag_name("rect")
            && n.parent().and_then(|p| p.attribute("class")).is_some_and(|c| c.starts_with("buffer "))
    };
    let mut count = 0;
    for rect in document.descendants().filter(is_buffer) {
        let number = |name| rect.attribute(name).unwrap().parse::<f64>().unwrap();
        let (x, y) = (number("x"), number("y"));
        assert!(x >= 0.0 && y >= 0.0 && x + number("width") <= 640.0 && y + number("height") <= 480.0);
        count += 1;
    }
    assert_eq!(count, map.problem.len());
    // Names occur only in text and in the label. In any other attribute, such a text is a badly formatted number.
    let attributes = document.descendants().flat_map(|node| node.attributes());
    for attribute in attributes.filter(|attribute| attribute.name() != "aria-label") {
        assert!(!attribute.value().contains("NaN") && !attribute.value().contains("inf"), "{attribute:?}");
    }
}

fn check_html(map: &MemoryMap<'_>) {
    let html = map.html();
    assert_eq!(html, map.html());
    // There is exactly one data element, one script and one style. So no name has opened or closed such an element.
    for tag in ["<script", "</script", "<style", "</style", "<title", "</title"] {
        assert_eq!(html.matches(tag).count(), if tag.contains("script") { 2 } else { 1 }, "{tag}");
    }
    let (_, data) = html.split_once(r#"id="data">"#).unwrap();
    let page: serde_json::Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    assert_eq!(page["title"], map.title);
    let packed = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, page["numbers"].as_str().unwrap());
    let packed = packed.unwrap();
    let mut bytes = packed.iter();
    let mut next = || {
        let (mut value, mut shift) = (0u128, 0);
        loop {
            let byte = *bytes.next().unwrap();
            value += u128::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                return u64::try_from(value).unwrap();
            }
        }
    };
    for r in map.rectangles() {
        let start = map.ticks.start + next();
        assert_eq!((start..start + next(), next(), next()), (r.ticks, r.offset, r.bytes));
        for name in [&r.label.tensor, &r.label.op, &r.label.layer] {
            assert_eq!(page["strings"][next() as usize], **name);
        }
        assert_eq!(page["roles"][next() as usize]["name"], r.label.role.name());
    }
    let mut tick = map.ticks.start;
    for _ in 0..page["steps"].as_u64().unwrap() {
        tick += next();
        let live: u64 = crate::live_at(map.problem, tick).map(|id| map.problem.buffer(id).bytes).sum();
        assert_eq!(next(), live);
    }
    assert!(bytes.next().is_none());
}

/// Names of any characters, and names that would break out of a page if they were not escaped.
fn name() -> impl Strategy<Value = String> {
    let hostile = [
        "</script><script>alert(1)</script>",
        "<!--",
        "]]>",
        "{title}",
        "\u{1b}[31m",
        "\u{202e}",
        "a&b\"'<c>",
        "\0\r\n\u{ffff}",
    ];
    prop_oneof![any::<String>(), prop::sample::select(hostile.to_vec()).prop_map(str::to_owned), "[a-z.0-9]{0,12}"]
}

/// A lifetime, a size and an offset: small ones, and some near the end of `u64`.
fn placed() -> impl Strategy<Value = (Range<u64>, u64, u64)> {
    let tick = || prop_oneof![4 => 0..50u64, 1 => any::<u64>()];
    let size = prop_oneof![20 => 0..1000u64, 2 => Just(0), 1 => (1u64 << 60)..(1 << 62), 1 => Just(u64::MAX)];
    (tick(), tick(), size, prop_oneof![4 => 0..5000u64, 1 => any::<u64>()]).prop_filter_map(
        "empty",
        |(a, b, bytes, offset)| {
            let offset = if offset.checked_add(bytes).is_some() { offset } else { 0 };
            (a != b).then(|| (a.min(b)..a.max(b), bytes, offset))
        },
    )
}

generated! {
    #![cases(128)]

    #[test]
    fn any_placed_problem_has_sound_pictures(
        title in name(),
        rows in prop::collection::vec((placed(), name(), name(), name(), 0..Role::ALL.len()), 0..24),
        phases in prop::collection::vec((0..60u64, 1..40u64, name()), 0..5),
    ) {
        let buffers = rows.iter().map(|((ticks, bytes, _), ..)| Buffer::new(ticks.clone(), *bytes)).collect();
        // Several huge ones may not fit together, and such problems cannot be created.
        prop_assume!(Problem::new(buffers).is_ok());
        let buffers = rows.iter().map(|((ticks, bytes, _), ..)| Buffer::new(ticks.clone(), *bytes)).collect();
        let problem = Problem::new(buffers).unwrap();
        let offsets: Vec<u64> = rows.iter().map(|((_, _, offset), ..)| *offset).collect();
        let labels: Vec<Label> =
            rows.iter().map(|(_, tensor, op, layer, role)| label(tensor, op, layer, Role::ALL[*role])).collect();
        let marks: Vec<Mark> = phases.into_iter().map(|(start, length, name)| Mark::new(start..start + length, name)).collect();
        check_pictures(&MemoryMap::new(&title, &problem, &offsets, &labels).unwrap().with_marks(&marks).unwrap());
    }
}
