//! Self-contained HTML pages: each page contains its style, script and data. Only a page that a server has sent may
//! fetch newer data.
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
    /// CSS of this page, appended to the CSS that all pages share.
    pub style: &'a str,
    /// The body as HTML.
    pub body: &'a str,
    /// JavaScript of this page, appended to the script that all pages share.
    pub script: &'a str,
    /// The page's data, as returned by [`json`]. The script reads them from the element with the id `data`.
    pub data: &'a str,
    /// Whether the page may fetch data from the server that sent the page. If false, the page may not fetch anything.
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

/// Serializes a value as JSON for a data element. A data element is a script element, which only `<` can end. So `<` is
/// escaped inside the JSON; this does not change the value.
pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are always JSON").replace('<', "\\u003c")
}

/// Replaces each placeholder of a template by its part. `parts` has pairs of placeholder and part, in the order in
/// which the placeholders occur in the template. A placeholder inside a part is not replaced.
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
