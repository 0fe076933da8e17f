//! Self-contained HTML pages: style, script and data are inside, and nothing is fetched.
//!
//! In: the contents of a page. Out: the page, with the style and plots that all pages of this crate share. Data are
//! escaped, so the browser never interprets them as HTML or script.

use gapless_alloc::draw::{THEME, escape};
use serde::Serialize;

/// The contents of a page.
pub(crate) struct Page<'a> {
    pub title: &'a str,
    /// The kind of the page, shown with the title.
    pub kind: &'a str,
    /// Style that follows the shared style.
    pub style: &'a str,
    /// The body as HTML.
    pub body: &'a str,
    /// Script that follows the shared script.
    pub script: &'a str,
    /// The result of [`json`]; the script reads it from the element with the id `data`.
    pub data: &'a str,
    /// Whether the page may fetch data from the server that sent it. If not, the page may not fetch anything.
    pub is_served: bool,
}

impl Page<'_> {
    pub fn html(&self) -> String {
        let style = [THEME, include_str!("assets/page.css"), self.style].concat();
        let script = [include_str!("assets/plot.js"), self.script].concat();
        let parts = [
            ("{sources}", if self.is_served { "; connect-src 'self'" } else { "" }),
            ("{title}", &*escape(self.title)),
            ("{kind}", self.kind),
            ("{style}", &style),
            ("{body}", self.body),
            ("{data}", self.data),
            ("{script}", &script),
        ];
        fill_template(include_str!("assets/page.html"), &parts)
    }
}

/// Serializes a value for a data element. Inside a script element only `<` can end it, so `<` is escaped, which is
/// still the same JSON.
pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are always JSON").replace('<', "\\u003c")
}

/// Fills each part into the template. The parts must be in the order of the template's placeholders. A placeholder
/// inside a part is not replaced.
fn fill_template(template: &str, parts: &[(&str, &str)]) -> String {
    let mut page = String::with_capacity(template.len() + parts.iter().map(|(_, text)| text.len()).sum::<usize>());
    let mut rest = template;
    for (name, text) in parts {
        let (before, behind) = rest.split_once(name).expect("the template has every part, in this order");
        page.extend([before, text]);
        rest = behind;
    }
    page + rest
}
