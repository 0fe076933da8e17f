//! Splits a template's source into tokens, like Jinja's lexer with `trim_blocks` and `lstrip_blocks`.

use std::sync::Arc;

use super::limits::{Fault, Outcome};
use super::strings::is_space;

/// A token, and its line.
#[derive(Debug, Clone)]
pub(super) struct Token {
    pub line: u32,
    pub kind: TokenKind,
}

/// The kinds of tokens.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TokenKind {
    Data(Arc<str>),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Str(String),
    Int(i128),
    Float(f64),
    /// A bracket, an operator or a separator.
    Sign(&'static str),
    End,
}

/// Brackets, operators and separators, longest first.
const SIGNS: [&str; 27] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";", "!",
];

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    tokens: Vec<Token>,
}

/// Returns the tokens of a template. The last one is [`TokenKind::End`].
pub(super) fn tokens(source: &str) -> Outcome<Vec<Token>> {
    let mut source = with_newlines(source);
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer { source: &source, at: 0, line: 1, tokens: Vec::new() };
    while lexer.at < source.len() {
        lexer.data()?;
    }
    lexer.push(TokenKind::End);
    Ok(lexer.tokens)
}

/// Replaces all line ends by `\n`.
pub(super) fn with_newlines(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

impl<'a> Lexer<'a> {
    fn push(&mut self, kind: TokenKind) {
        self.tokens.push(Token { line: self.line, kind });
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Outcome<T> {
        Err(Fault { reason: reason.into(), line: Some(self.line) })
    }

    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn skip(&mut self, bytes: usize) {
        self.line += self.rest()[..bytes].matches('\n').count() as u32;
        self.at += bytes;
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start_matches(is_space).len());
    }

    fn take(&mut self, text: &str) -> bool {
        let is_there = self.rest().starts_with(text);
        if is_there {
            self.skip(text.len());
        }
        is_there
    }

    /// Reads text up to the next tag, and the beginning of that tag.
    fn data(&mut self) -> Outcome<()> {
        let rest = self.rest();
        let is_tag = |&(index, _): &(usize, &str)| {
            rest[index..].starts_with(['{']) && rest[index + 1..].starts_with(['{', '%', '#'])
        };
        let Some((length, _)) = rest.match_indices('{').find(is_tag) else {
            self.push_data(rest);
            self.skip(rest.len());
            return Ok(());
        };
        let tag = &rest[length..length + 2];
        self.push_data(self.stripped(&rest[..length], &rest[length + 2..], tag == "{{"));
        self.skip(length + 2);
        if !self.take("-") {
            self.take("+");
        }
        match tag {
            "{#" => self.comment(),
            "{{" => {
                self.push(TokenKind::VariableBegin);
                self.inside("}}", TokenKind::VariableEnd)
            }
            _ => match self.raw_begin() {
                Some(length) => {
                    self.skip(length);
                    self.raw()
                }
                None => {
                    self.push(TokenKind::BlockBegin);
                    self.inside("%}", TokenKind::BlockEnd)
                }
            },
        }
    }

    fn push_data(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(TokenKind::Data(text.into()));
        }
    }

    /// Removes the white space at the end of `text` that the following tag strips.
    fn stripped<'t>(&self, text: &'t str, behind: &str, is_variable: bool) -> &'t str {
        if behind.starts_with('-') {
            return text.trim_end_matches(is_space);
        }
        let line = text.rfind('\n').map_or(0, |end| end + 1);
        let starts_line = line > 0 || self.at == 0 || self.source[..self.at].ends_with('\n');
        match !behind.starts_with('+') && !is_variable && starts_line && text[line..].chars().all(is_space) {
            true => &text[..line],
            false => text,
        }
    }

    /// Skips the white space that a tag's end strips. After `-`, that is all white space; otherwise it is one line end,
    /// and only after a block or a comment.
    fn behind_tag(&mut self, sign: &str, trims: bool) {
        match sign {
            "-" => self.skip_space(),
            "" if trims => _ = self.take("\n"),
            _ => {}
        }
    }

    fn comment(&mut self) -> Outcome<()> {
        let Some(length) = self.rest().find("#}") else { return self.fail("a comment has no end; write #}") };
        let sign = ["-", "+"].into_iter().find(|sign| self.rest()[..length].ends_with(sign)).unwrap_or("");
        self.skip(length + 2);
        self.behind_tag(sign, true);
        Ok(())
    }

    /// Returns the length in bytes of `raw %}` if that comes next, otherwise `None`.
    fn raw_begin(&self) -> Option<usize> {
        let rest = self.rest();
        let behind = rest.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
        let left = match behind.strip_prefix("-%}") {
            Some(behind) => behind.trim_start_matches(is_space),
            None => behind.strip_prefix("%}")?,
        };
        Some(rest.len() - left.len())
    }

    fn raw(&mut self) -> Outcome<()> {
        let rest = self.rest();
        for (index, _) in rest.match_indices("{%") {
            let inside = rest[index + 2..].trim_start_matches(['-', '+']);
            let Some(behind) = inside.trim_start_matches(is_space).strip_prefix("endraw") else { continue };
            let behind = behind.trim_start_matches(is_space);
            let sign = ["-", "+"].into_iter().find(|sign| behind.starts_with(sign)).unwrap_or("");
            if let Some(left) = behind[sign.len()..].strip_prefix("%}") {
                self.push_data(self.stripped(&rest[..index], &rest[index + 2..], false));
                self.skip(rest.len() - left.len());
                self.behind_tag(sign, true);
                return Ok(());
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
        self.fail("a raw block has no end; write {% endraw %}")
    }

    /// Reads tokens up to the end of a tag.
    fn inside(&mut self, end: &str, kind: TokenKind) -> Outcome<()> {
        let mut brackets: Vec<&str> = Vec::new();
        loop {
            self.skip_space();
            if brackets.is_empty() {
                let is_block = kind == TokenKind::BlockEnd;
                for sign in ["-", "+", ""] {
                    // A variable's end cannot have a `+` before it, since `+` would be an operator there.
                    if (sign != "+" || is_block)
                        && self.rest().strip_prefix(sign).is_some_and(|rest| rest.starts_with(end))
                    {
                        self.push(kind.clone());
                        self.skip(sign.len() + 2);
                        self.behind_tag(sign, is_block);
                        return Ok(());
                    }
                }
            }
            let Some(first) = self.rest().chars().next() else {
                return self.fail(format!("the template ends within a tag; write {end}"));
            };
            if first.is_ascii_digit() {
                self.number()?;
            } else if first == '_' || first.is_alphanumeric() {
                self.name()?;
            } else if first == '\'' || first == '"' {
                self.string(first)?;
            } else {
                let Some(sign) = SIGNS.into_iter().find(|sign| self.rest().starts_with(sign)) else {
                    return self.fail(format!("unexpected character {first:?}"));
                };
                match sign {
                    "(" => brackets.push(")"),
                    "[" => brackets.push("]"),
                    "{" => brackets.push("}"),
                    ")" | "]" | "}" if brackets.pop() != Some(sign) => {
                        return self.fail(format!("unexpected '{sign}'"));
                    }
                    "!" => return self.fail("unexpected character '!'"),
                    _ => {}
                }
                self.push(TokenKind::Sign(sign));
                self.skip(sign.len());
            }
        }
    }

    fn name(&mut self) -> Outcome<()> {
        let rest = self.rest();
        let length = rest.find(|letter: char| letter != '_' && !letter.is_alphanumeric()).unwrap_or(rest.len());
        self.push(TokenKind::Name(rest[..length].into()));
        self.skip(length);
        Ok(())
    }

    fn number(&mut self) -> Outcome<()> {
        let rest = self.rest();
        // Digits may be separated by single underscores.
        let digits = |text: &str, radix: u32| {
            let mut length = 0;
            for (index, letter) in text.char_indices() {
                match letter {
                    _ if letter.is_digit(radix) => length = index + 1,
                    '_' if length == index && index > 0 => {}
                    _ => break,
                }
            }
            length
        };
        for (prefix, radix) in [("0b", 2), ("0o", 8), ("0x", 16)] {
            if rest.get(..2).is_some_and(|start| start.eq_ignore_ascii_case(prefix)) {
                let behind = rest[2..].trim_start_matches('_');
                let (skipped, length) = (rest.len() - behind.len(), digits(behind, radix));
                let Ok(value) = i128::from_str_radix(&behind[..length].replace('_', ""), radix) else {
                    return self.fail(format!("the number at {} is not one of 128 bits", &rest[..rest.len().min(12)]));
                };
                self.push(TokenKind::Int(value));
                self.skip(skipped + length);
                return Ok(());
            }
        }
        let whole = digits(rest, 10);
        let mut length = whole;
        let is_item = self.tokens.last().is_some_and(|token| token.kind == TokenKind::Sign("."));
        if !is_item {
            if let Some(fraction) = rest[length..].strip_prefix('.') {
                match digits(fraction, 10) {
                    0 => {}
                    count => length += 1 + count,
                }
            }
            if let Some(exponent) = rest[length..].strip_prefix(['e', 'E']) {
                let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
                match digits(unsigned, 10) {
                    0 => {}
                    count => length += 1 + exponent.len() - unsigned.len() + count,
                }
            }
        }
        let text = rest[..length].replace('_', "");
        let kind = match length > whole {
            true => text.parse().ok().map(TokenKind::Float),
            false => text.parse().ok().map(TokenKind::Int),
        };
        let Some(kind) = kind else { return self.fail(format!("{text} is not an integer of 128 bits")) };
        if length == whole && whole > 1 && text.starts_with('0') && text.bytes().any(|digit| digit != b'0') {
            return self.fail(format!("{text} starts with a zero"));
        }
        self.push(kind);
        self.skip(length);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Outcome<()> {
        let rest = self.rest();
        let mut letters = rest.char_indices().skip(1);
        let end = loop {
            match letters.next() {
                Some((_, '\\')) => _ = letters.next(),
                Some((index, letter)) if letter == quote => break index,
                Some(_) => {}
                None => return self.fail("a string has no end"),
            }
        };
        let Some(text) = unescaped(&rest[1..end]) else {
            return self.fail(format!("the string {} has an escape that stands for no character", &rest[..=end]));
        };
        self.push(TokenKind::Str(text));
        self.skip(end + 1);
        Ok(())
    }
}

/// Decodes a string literal like Python's `unicode-escape`. Returns `None` if an escape is malformed.
fn unescaped(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(index) = rest.find('\\') {
        out.push_str(&rest[..index]);
        let letter = rest[index + 1..].chars().next()?;
        rest = &rest[index + 1 + letter.len_utf8()..];
        let mut number = |most: usize, radix: u32, exact: bool| {
            let length = rest.chars().take(most).take_while(|digit| digit.is_digit(radix)).count();
            let digits = &rest[..length];
            rest = &rest[length..];
            u32::from_str_radix(digits, radix).ok().filter(|_| !exact || length == most).and_then(char::from_u32)
        };
        let simple = match letter {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            '\\' | '\'' | '"' => letter,
            'x' => number(2, 16, true)?,
            'u' => number(4, 16, true)?,
            'U' => number(8, 16, true)?,
            'N' => return None,
            '0'..='7' => {
                rest = &text[text.len() - rest.len() - 1..];
                let length = rest.bytes().take(3).take_while(|digit| (b'0'..b'8').contains(digit)).count();
                let value = u32::from_str_radix(&rest[..length], 8).ok().and_then(char::from_u32)?;
                rest = &rest[length..];
                value
            }
            '\n' => continue,
            other => {
                out.push('\\');
                other
            }
        };
        out.push(simple);
    }
    out.push_str(rest);
    Some(out)
}
