//! Parses tokens into a syntax tree, by Jinja's grammar with loop controls and `generation` blocks.

use std::sync::Arc;

use super::ast::{Body, Expr, For, Kind, MacroNode, Statement, Target, Uses};
use super::lexer::{Token, TokenKind, tokens};
use super::limits::{Fault, NESTING, Outcome, PARAMETERS};

/// A parser and its position among the tokens.
pub(super) struct Parser {
    pub(super) tokens: Vec<Token>,
    pub(super) at: usize,
    pub(super) depth: usize,
    /// Number of nodes on the longest path from the root of the last parsed expression to a leaf.
    pub(super) height: usize,
    /// Errors for unknown filters and tests. They reject the template even if no rendering evaluates them.
    pub(super) unknown: Vec<Fault>,
    /// For each macro being parsed, the special variables that its body uses.
    pub(super) uses: Vec<Uses>,
    /// True inside a loop, where `break` and `continue` are allowed.
    pub(super) is_in_loop: bool,
    /// True inside a condition, where an unknown filter or test is an error only when it is rendered.
    pub(super) is_soft: bool,
    pub(super) marks_answers: bool,
}

/// Parses a template's statements. Also returns true if any of them is a generation block.
pub(super) fn parse(source: &str) -> Outcome<(Body, bool)> {
    let mut parser = Parser {
        tokens: tokens(source)?,
        at: 0,
        depth: 0,
        height: 0,
        unknown: Vec::new(),
        uses: vec![Uses::default()],
        is_in_loop: false,
        is_soft: false,
        marks_answers: false,
    };
    let body = parser.body(&[])?.0;
    match parser.unknown.into_iter().next() {
        Some(fault) => Err(fault),
        None => Ok((body, parser.marks_answers)),
    }
}

impl Parser {
    pub(super) fn kind(&self) -> &TokenKind {
        &self.tokens[self.at].kind
    }

    pub(super) fn next(&mut self) -> TokenKind {
        let kind = self.kind().clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        kind
    }

    pub(super) fn fail<T>(&self, reason: impl Into<String>) -> Outcome<T> {
        Err(Fault { reason: reason.into(), line: Some(self.tokens[self.at].line) })
    }

    pub(super) fn unexpected<T>(&self, expected: &str) -> Outcome<T> {
        let found = match self.kind() {
            TokenKind::End => "the end of the template".into(),
            TokenKind::VariableEnd => "}}".into(),
            TokenKind::BlockEnd => "%}".into(),
            TokenKind::Name(name) => name.to_string(),
            TokenKind::Sign(sign) => (*sign).to_owned(),
            other => format!("{other:?}"),
        };
        self.fail(format!("expected {expected}, found {found}"))
    }

    pub(super) fn is_sign(&self, sign: &str) -> bool {
        matches!(self.kind(), TokenKind::Sign(found) if *found == sign)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(self.kind(), TokenKind::Name(name) if **name == *word)
    }

    pub(super) fn is_word_next(&self, word: &str) -> bool {
        matches!(self.tokens.get(self.at + 1).map(|token| &token.kind), Some(TokenKind::Name(name)) if **name == *word)
    }

    pub(super) fn take_sign(&mut self, sign: &str) -> bool {
        let found = self.is_sign(sign);
        self.at += usize::from(found);
        found
    }

    pub(super) fn take_word(&mut self, word: &str) -> bool {
        let found = self.is_word(word);
        self.at += usize::from(found);
        found
    }

    pub(super) fn sign(&mut self, sign: &str) -> Outcome<()> {
        if self.take_sign(sign) { Ok(()) } else { self.unexpected(sign) }
    }

    pub(super) fn word(&mut self, word: &str) -> Outcome<()> {
        if self.take_word(word) { Ok(()) } else { self.unexpected(word) }
    }

    pub(super) fn name(&mut self) -> Outcome<Arc<str>> {
        let TokenKind::Name(name) = self.kind().clone() else { return self.unexpected("a name") };
        self.at += 1;
        Ok(name)
    }

    pub(super) fn block_end(&mut self) -> Outcome<()> {
        if *self.kind() != TokenKind::BlockEnd {
            return self.unexpected("%}");
        }
        self.next();
        Ok(())
    }

    pub(super) fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        if self.depth >= NESTING {
            return self.fail(format!("the template is nested more than {NESTING} deep"));
        }
        self.depth += 1;
        let result = parse(self);
        self.depth -= 1;
        result
    }

    /// Parses statements, up to and including a tag with one of the names `ends` or up to the end of the template.
    /// Returns the name of that tag too.
    fn body(&mut self, ends: &[&'static str]) -> Outcome<(Body, &'static str)> {
        self.deeper(|parser| {
            let mut body = Vec::new();
            loop {
                let line = parser.tokens[parser.at].line;
                let kind = match parser.next() {
                    TokenKind::Data(text) => Kind::Text(text),
                    TokenKind::VariableBegin => {
                        let value = parser.tuple(true)?;
                        if *parser.kind() != TokenKind::VariableEnd {
                            return parser.unexpected("}}");
                        }
                        parser.next();
                        Kind::Print(value)
                    }
                    TokenKind::BlockBegin => {
                        if let Some(end) = ends.iter().copied().find(|end| parser.is_word(end)) {
                            parser.at += 1;
                            return Ok((body, end));
                        }
                        let statements = parser.statement()?;
                        parser.block_end()?;
                        body.extend(statements.into_iter().map(|kind| Statement { line, kind }));
                        continue;
                    }
                    _ if ends.is_empty() => return Ok((body, "")),
                    _ => return parser.fail(format!("the template ends where {} is missing", ends.join(" or "))),
                };
                body.push(Statement { line, kind });
            }
        })
    }

    /// Parses from after the name of a tag to the end of its last end tag.
    fn rest(&mut self, ends: &[&'static str]) -> Outcome<(Body, &'static str)> {
        self.take_sign(":");
        self.block_end()?;
        self.body(ends)
    }

    /// Parses statements in a frame of their own. Conditions around the frame do not make unknown filters and tests
    /// acceptable in it.
    fn frame(&mut self, in_loop: bool, ends: &[&'static str]) -> Outcome<(Body, &'static str)> {
        let outer = (self.is_in_loop, self.is_soft);
        (self.is_in_loop, self.is_soft) = (in_loop, false);
        let result = self.rest(ends);
        (self.is_in_loop, self.is_soft) = outer;
        result
    }

    fn statement(&mut self) -> Outcome<Vec<Kind>> {
        let tag = self.name()?;
        Ok(vec![match &*tag {
            "for" => self.for_loop()?,
            "if" => self.condition()?,
            "set" => self.set()?,
            "macro" => {
                let name = self.name()?;
                let parameters = self.parameters()?;
                Kind::Macro(self.macro_body(name, parameters, "endmacro")?)
            }
            "call" => {
                let parameters = if self.is_sign("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression(true)?;
                if !matches!(call, Expr::Call(..)) {
                    return self.fail("expected a macro call after call");
                }
                Kind::Call(call, self.macro_body("caller".into(), parameters, "endcall")?)
            }
            "filter" => {
                let filter = self.filters(Expr::Captured, true)?;
                Kind::Filter(filter, self.frame(false, &["endfilter"])?.0)
            }
            "with" => {
                let mut values = Vec::new();
                while *self.kind() != TokenKind::BlockEnd {
                    if !values.is_empty() {
                        self.sign(",")?;
                    }
                    let target = self.target(false)?;
                    self.sign("=")?;
                    values.push((target, self.expression(true)?));
                }
                let in_loop = self.is_in_loop;
                Kind::With(values, self.frame(in_loop, &["endwith"])?.0)
            }
            "block" => {
                let name = self.name()?;
                let is_scoped = self.take_word("scoped");
                if self.is_word("required") {
                    return self.fail("a required block is not supported");
                }
                let body = self.frame(false, &["endblock"])?.0;
                self.take_word(&name);
                Kind::Block { is_scoped, body }
            }
            "generation" => {
                self.marks_answers = true;
                Kind::Generation(self.frame(false, &["endgeneration"])?.0)
            }
            "print" => {
                let mut values = Vec::new();
                while *self.kind() != TokenKind::BlockEnd {
                    if !values.is_empty() {
                        self.sign(",")?;
                    }
                    values.push(Kind::Print(self.expression(true)?));
                }
                return Ok(values);
            }
            "break" | "continue" if !self.is_in_loop => return self.fail(format!("{tag} stands outside a loop")),
            "break" => Kind::Break,
            "continue" => Kind::Continue,
            "autoescape" | "extends" | "include" | "import" | "from" => {
                return self.fail(format!("the tag {tag} is not supported: a chat template is one file of plain text"));
            }
            _ => return self.fail(format!("the tag {tag} is unknown here")),
        }])
    }

    fn for_loop(&mut self) -> Outcome<Kind> {
        let target = self.target(false)?;
        self.word("in")?;
        let over = self.tuple(false)?;
        let condition = if self.take_word("if") { Some(self.expression(true)?) } else { None };
        let is_recursive = self.take_word("recursive");
        let (body, end) = self.frame(true, &["endfor", "else"])?;
        let otherwise = if end == "else" { self.frame(self.is_in_loop, &["endfor"])?.0 } else { Vec::new() };
        Ok(Kind::For(Arc::new(For { target, over, condition, is_recursive, body, otherwise })))
    }

    fn condition(&mut self) -> Outcome<Kind> {
        let outer = self.is_soft;
        let (mut branches, mut otherwise) = (Vec::new(), Vec::new());
        loop {
            self.is_soft = true;
            let condition = self.tuple(false)?;
            let (body, end) = self.rest(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match end {
                "elif" => continue,
                "else" => otherwise = self.rest(&["endif"])?.0,
                _ => {}
            }
            self.is_soft = outer;
            return Ok(Kind::If(branches, otherwise));
        }
    }

    fn set(&mut self) -> Outcome<Kind> {
        let target = self.target(true)?;
        if self.take_sign("=") {
            return Ok(Kind::Set(target, self.tuple(true)?));
        }
        let filter = if self.is_sign("|") { Some(self.filters(Expr::Captured, false)?) } else { None };
        Ok(Kind::SetBlock(target, filter, self.frame(false, &["endset"])?.0))
    }

    fn parameters(&mut self) -> Outcome<Vec<(Arc<str>, Option<Expr>)>> {
        self.sign("(")?;
        let mut parameters: Vec<(Arc<str>, Option<Expr>)> = Vec::new();
        while !self.take_sign(")") {
            if !parameters.is_empty() {
                self.sign(",")?;
            }
            let name = self.name()?;
            let default = if self.take_sign("=") { Some(self.expression(true)?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.fail(format!("the parameter {name} without a default follows one with a default"));
            }
            if parameters.iter().any(|(other, _)| *other == name) {
                return self.fail(format!("the parameter {name} is there twice"));
            }
            parameters.push((name, default));
            if parameters.len() > PARAMETERS {
                return self.fail(format!("a macro has more than {PARAMETERS} parameters"));
            }
        }
        Ok(parameters)
    }

    fn macro_body(
        &mut self,
        name: Arc<str>,
        parameters: Vec<(Arc<str>, Option<Expr>)>,
        end: &'static str,
    ) -> Outcome<Arc<MacroNode>> {
        self.uses.push(Uses::default());
        let body = self.frame(false, &[end])?.0;
        let uses = self.uses.pop().expect("it was pushed");
        // Variables that an inner macro uses count as used by the outer macro, too.
        let outer = self.uses.last_mut().expect("the template's own is never popped");
        outer.varargs |= uses.varargs;
        outer.kwargs |= uses.kwargs;
        outer.caller |= uses.caller;
        Ok(Arc::new(MacroNode { name, parameters, body, uses }))
    }

    /// Parses the target of an assignment: a name, a tuple of names, or an attribute of a namespace.
    fn target(&mut self, with_attribute: bool) -> Outcome<Target> {
        let (mut targets, mut is_tuple) = (Vec::new(), false);
        loop {
            if self.is_sign(")") || *self.kind() == TokenKind::BlockEnd {
                break;
            }
            targets.push(self.deeper(|parser| parser.one_target(with_attribute))?);
            if !self.take_sign(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, targets.pop()) {
            (false, Some(target)) => Ok(target),
            (true, Some(last)) => {
                targets.push(last);
                Ok(Target::Tuple(targets))
            }
            (_, None) => self.unexpected("a name"),
        }
    }

    fn one_target(&mut self, with_attribute: bool) -> Outcome<Target> {
        if self.take_sign("(") {
            let target = self.target(false)?;
            self.sign(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if matches!(&*name, "true" | "false" | "none" | "True" | "False" | "None") {
            return self.fail(format!("{name} cannot be set"));
        }
        if with_attribute && self.take_sign(".") {
            return Ok(Target::Attribute(name, self.name()?));
        }
        Ok(Target::Name(name))
    }
}
