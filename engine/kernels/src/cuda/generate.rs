//! Writes the source of a kernel for one elementwise operation, or for several fused operations, and prepares its
//! launch.
//!
//! - In: operations described as [`Fusible`]s, and the addresses and layouts of their operands.
//! - Out: a kernel.
//! - Never: a decision about which operations are fused.
//!
//! The source contains expressions, types, and the kind of each operand's layout. Addresses, extents and constants
//! are arguments of the kernel. So equal layers have equal sources, and share one kernel.
//!
//! Contiguous elements are moved 16 bytes at a time if their addresses are aligned. All other elements are moved one
//! by one. If the operations include a normalization, the kernel assigns rows to blocks like the kernels of norm.cu.

use std::ffi::c_void;
use std::fmt::Write;

use candle_core::{DType, Layout};

use super::launch::{self, Arguments, OnePass, RowBlocks, Strides};
use super::{Constant, Family, Features, Fusible, Generated, Kernel, Launch, Operand, Operands, Random};

/// One of the operations that a kernel fuses.
#[derive(Debug, Clone)]
pub struct Member<'a> {
    /// The operation's name.
    pub name: &'a str,
    /// The description of the operation's computation.
    pub fusible: Fusible,
    /// The source of each input.
    pub inputs: Vec<Source>,
}

/// The source of a member's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// An input of the fused kernel, by its index.
    Memory(usize),
    /// An output of an earlier member: the member's index, and the output's.
    Member(usize, usize),
}

/// Returns the launch of an elementwise operation that is not fused with others. Returns `None` for all other
/// operations, and for types without kernels.
pub fn each(name: &str, fusible: Fusible, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let Fusible::Each { outputs, .. } = &fusible else { return None };
    let inputs = operands.inputs.len();
    if !fusible.is_well_formed(inputs) {
        return None;
    }
    let outputs: Vec<(usize, usize)> = (0..outputs.len()).map(|output| (0, output)).collect();
    let member = Member { name, fusible, inputs: (0..inputs).map(Source::Memory).collect() };
    Some(vec![Launch::Kernel(kernel(&[member], &outputs, operands)?)])
}

/// Returns the launch of an elementwise function on contiguous tensors at these addresses. Some addresses may be
/// equal. Returns `None` if there are no kernels for the type.
pub(super) fn dense(
    name: &str,
    expression: &str,
    inputs: &[u64],
    output: u64,
    (count, dtype): (u64, DType),
) -> Option<Launch> {
    let operand = |&address: &u64| Operand { address, layout: Layout::contiguous(count as usize), dtype };
    let (inputs, outputs): (Vec<Operand>, _) = (inputs.iter().map(operand).collect(), [operand(&output)]);
    let random = Random { key: 0, micro_batch: 0 };
    let features = Features::default();
    let operands =
        Operands { inputs: &inputs, outputs: &outputs, workspace: &[], accumulate: 0, tickets: 0, random, features };
    each(name, Fusible::each(expression), &operands)?.pop()
}

/// The arguments of a generated kernel, as fields of 8 bytes.
#[derive(Debug)]
struct Words(Box<[u64]>);

impl Arguments for Words {
    fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    fn address(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }
}

/// The fields of the argument struct: their declarations as text, and their values.
#[derive(Debug, Default)]
struct Fields {
    text: String,
    words: Vec<u64>,
}

impl Fields {
    fn push(&mut self, declaration: &str, words: impl IntoIterator<Item = u64>) {
        line(&mut self.text, 1, format_args!("{declaration};"));
        self.words.extend(words);
    }
}

fn line(text: &mut String, depth: usize, what: std::fmt::Arguments<'_>) {
    writeln!(text, "{:1$}{what}", "", 4 * depth).expect("strings take all that is written");
}

/// The kind of an operand's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lies {
    /// Contiguous: element i is at index i.
    Dense,
    /// A single element in memory, which is broadcast to all indices.
    Number,
    /// Any other layout. The kernel computes each offset from the strides.
    Strided,
}

impl Lies {
    fn of(operand: &Operand) -> Self {
        let mut extents = operand.layout.dims().iter().zip(operand.layout.stride());
        if operand.layout.is_contiguous() {
            Self::Dense
        } else if extents.all(|(&extent, &stride)| extent <= 1 || stride == 0) {
            Self::Number
        } else {
            Self::Strided
        }
    }
}

/// Returns a type's name in the kernels that read the type, or `None` if no kernel does.
fn type_of(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("f32"),
        DType::BF16 => Some("bf16"),
        DType::U8 => Some("u8"),
        DType::U32 => Some("u32"),
        _ => None,
    }
}

/// The placeholder for the kernel's name until its source, and so the name's hash, is known.
const UNNAMED: &str = "UNNAMED";

/// Returns the kernel that computes the members in order. `outputs` lists the stored results, each as a member's
/// index and the index of that member's output. Returns `None` if an operand has a type or a layout that the kernels
/// do not support.
pub fn kernel(members: &[Member<'_>], outputs: &[(usize, usize)], operands: &Operands<'_>) -> Option<Kernel> {
    let writer = Writer { members, outputs, operands };
    let first = outputs.iter().position(|&(member, _)| makes_elements(&members[member].fusible))?;
    let count = operands.outputs[first].count();
    let mut fields = Fields::default();
    fields.push("u64 count", [count]);
    let loaded = writer.loads(&mut fields)?;
    let stored = writer.stores(&mut fields)?;
    let mut body = writer.constants(&mut fields);
    writer.each(&mut body, &loaded, &stored);
    let one_pass = writer.one_pass()?;
    let pack = writer.several(&mut body, &loaded, &stored);
    let blocks = writer.rows(&mut fields, &mut body, one_pass.as_ref())?;
    if blocks.is_none() {
        writer.flat(&mut body);
    }

    // Operations defined outside of this crate may have names that are not valid identifiers in C.
    let word = |name: &str| name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let names: Vec<String> = members.iter().map(|member| word(member.name)).collect();
    let mut text = String::from("#include \"fused.cuh\"\n\n");
    line(&mut text, 0, format_args!("// {}.", names.join(", ")));
    line(&mut text, 0, format_args!("struct Operands {{\n{}}};\n", fields.text));
    let bounds = one_pass.map(|one_pass| one_pass.bounds).or(blocks.map(|_| [launch::MOST_THREADS, 1]));
    let declared = match bounds {
        Some([threads, blocks]) => format!("BOUNDED_KERNEL({UNNAMED}, Operands, {threads}, {blocks})"),
        None => format!("KERNEL({UNNAMED}, Operands)"),
    };
    let operands = writer.operands(&loaded, &stored);
    line(&mut text, 0, format_args!("{declared} {{\n{operands}{body}}}"));
    let name = named(&names, stored.first()?.type_name, &text);
    let generated = Generated::of(format!("{name}.cu"), text.replace(UNNAMED, &name));
    let (family, arguments) = (Family::Generated(generated), Words(fields.words.into()));
    Some(match blocks {
        Some(blocks) => blocks.kernel(family, name, arguments),
        None => Kernel::flat(family, name, count.div_ceil(pack), arguments),
    })
}

/// True if a member's outputs are stored element by element. Other members store whole rows, or sums over rows.
fn makes_elements(fusible: &Fusible) -> bool {
    !matches!(fusible, Fusible::Norm { .. } | Fusible::NormGradWeight)
}

/// Returns the kernel's name: its operations, the stored type, and a hash of the source. So different sources have
/// different names.
fn named(names: &[String], dtype: &str, text: &str) -> String {
    const MOST: usize = 6;
    let mut all = names[..names.len().min(MOST)].join("_");
    if names.len() > MOST {
        write!(all, "_and_{}_more", names.len() - MOST).expect("strings take all that is written");
    }
    let hash = blake3::hash(text.as_bytes()).to_hex();
    let kind = if names.len() > 1 { "fused" } else { "elementwise" };
    format!("{kind}_{all}_{dtype}_{}", &hash[..8])
}

struct Writer<'a> {
    members: &'a [Member<'a>],
    outputs: &'a [(usize, usize)],
    operands: &'a Operands<'a>,
}

/// An operand that the kernel reads or writes element by element.
struct Element {
    /// The index of the input or output.
    index: usize,
    lies: Lies,
    dtype: DType,
    type_name: &'static str,
}

impl Element {
    /// Returns the expression for element `j` of the group that starts at `i`, as an f32. For contiguous operands the
    /// whole group was loaded before.
    fn load(&self) -> String {
        let Self { index, lies, .. } = self;
        match lies {
            Lies::Dense => format!("of_x{index}[j]"),
            Lies::Number => format!("load(to.x{index})"),
            Lies::Strided => format!("load(to.x{index} + to.at_x{index}.at(i + j))"),
        }
    }
}

impl Writer<'_> {
    fn members(&self) -> impl Iterator<Item = (usize, &[Source], &Fusible)> {
        self.members.iter().enumerate().map(|(index, member)| (index, &*member.inputs, &member.fusible))
    }

    /// Declares the inputs that elementwise members read. Returns `None` if the kernels do not support the type or
    /// layout of one of them.
    fn loads(&self, fields: &mut Fields) -> Option<Vec<Element>> {
        let mut all = Vec::new();
        for (index, operand) in self.operands.inputs.iter().enumerate() {
            let each = self.members().filter(|(.., fusible)| matches!(fusible, Fusible::Each { .. }));
            let read = each.flat_map(|(_, inputs, _)| inputs).any(|source| *source == Source::Memory(index));
            if !read {
                continue;
            }
            let (lies, type_name) = (Lies::of(operand), type_of(operand.dtype)?);
            fields.push(&format!("const {type_name}* x{index}"), [operand.address]);
            if lies == Lies::Strided {
                fields.push(&format!("Strides at_x{index}"), Strides::of(operand)?.words());
            }
            all.push(Element { index, lies, dtype: operand.dtype, type_name });
        }
        Some(all)
    }

    /// Declares the outputs that are stored element by element. Returns `None` if the kernels cannot store the type
    /// of one of them.
    fn stores(&self, fields: &mut Fields) -> Option<Vec<Element>> {
        let mut all = Vec::new();
        for (index, (operand, &(member, _))) in self.operands.outputs.iter().zip(self.outputs).enumerate() {
            if makes_elements(&self.members[member].fusible) {
                // Ids (u32) cannot be stored: the kernel computes in f32, which would round them.
                let type_name = type_of(operand.dtype).filter(|_| operand.dtype != DType::U32)?;
                fields.push(&format!("{type_name}* y{index}"), [operand.address]);
                all.push(Element { index, lies: Lies::Dense, dtype: operand.dtype, type_name });
            }
        }
        Some(all)
    }

    /// Gives each argument a local name. For tensors with slots, the addresses and the number of elements are read
    /// from the slots.
    fn operands(&self, loaded: &[Element], stored: &[Element]) -> String {
        let Operands { inputs, outputs, .. } = self.operands;
        let read = loaded.iter().filter(|x| inputs[x.index].has_slot()).map(|x| format!("x{}", x.index));
        let written = || stored.iter().filter(|y| outputs[y.index].has_slot()).map(|y| format!("y{}", y.index));
        let placed: Vec<String> = read.chain(written()).collect();
        let mut text = String::new();
        let declared = if placed.is_empty() { "const Operands& to" } else { "Operands to" };
        line(&mut text, 1, format_args!("{declared} = arguments;"));
        for first in written().take(1) {
            line(&mut text, 1, format_args!("to.count = counted(to.{first});"));
        }
        for name in placed {
            line(&mut text, 1, format_args!("to.{name} = placed(to.{name});"));
        }
        text
    }

    /// Declares the constants. Returns the text that initializes the sequences of random numbers among them.
    fn constants(&self, fields: &mut Fields) -> String {
        let mut set_up = String::new();
        let random = &self.operands.random;
        for (member, _, fusible) in self.members() {
            let Fusible::Each { constants, .. } = fusible else { continue };
            for (index, constant) in constants.iter().enumerate() {
                let name = format!("c{member}_{index}");
                match *constant {
                    Constant::Number(x) => fields.push(&format!("f64 {name}"), [f64::from(x).to_bits()]),
                    Constant::Bits(bits) => fields.push(&format!("u64 {name}"), [bits]),
                    Constant::Place { key, elements } => {
                        fields.push(&format!("Random random_{name}"), [random.key, random.micro_batch]);
                        fields.push(&format!("u64 {name}"), [key]);
                        let count = match elements {
                            None => "count".to_owned(),
                            Some(elements) => {
                                let count = format!("count_{name}");
                                fields.push(&format!("u64 {count}"), [elements]);
                                count
                            }
                        };
                        let numbers =
                            format!("const Numbers {name} = Numbers::at(to.random_{name}, to.{name}, to.{count});");
                        line(&mut set_up, 1, format_args!("{numbers}"));
                    }
                }
            }
        }
        set_up
    }

    /// Writes the function that computes one element of every output from one element of every input.
    fn each(&self, body: &mut String, loaded: &[Element], stored: &[Element]) {
        let mut parameters = vec!["u64 i".to_owned()];
        parameters.extend(self.head().map(|_| "f32 head".into()));
        parameters.extend(loaded.iter().map(|x| format!("f32 x{}", x.index)));
        parameters.extend(stored.iter().map(|y| format!("f32& y{}", y.index)));
        line(body, 1, format_args!("const auto each = [&]({}) {{", parameters.join(", ")));
        for (member, inputs, fusible) in self.members() {
            let Fusible::Each { outputs, constants } = fusible else { continue };
            for (output, expression) in outputs.iter().enumerate() {
                let is_stored = self.outputs.contains(&(member, output));
                if is_stored || self.is_read(Source::Member(member, output)) {
                    let value = self.value(expression, member, inputs, constants);
                    line(body, 2, format_args!("const f32 v{member}_{output} = {value};"));
                }
            }
        }
        for y in stored {
            let (member, output) = self.outputs[y.index];
            line(body, 2, format_args!("y{} = {};", y.index, self.register(Source::Member(member, output))));
        }
        line(body, 1, format_args!("}};"));
    }

    /// True if an elementwise member reads this value, which then stays in registers.
    fn is_read(&self, source: Source) -> bool {
        let each = self.members().filter(|(.., fusible)| matches!(fusible, Fusible::Each { .. }));
        each.flat_map(|(_, inputs, _)| inputs).any(|of_input| *of_input == source)
    }

    /// Returns an expression in which the placeholders are replaced by the names of inputs and constants.
    fn value(&self, expression: &str, member: usize, inputs: &[Source], constants: &[Constant]) -> String {
        let mut value = String::new();
        let mut rest = expression.chars();
        while let Some(letter) = rest.next() {
            let mut index =
                || rest.next().and_then(|digit| digit.to_digit(10)).expect("a digit behind $ and %") as usize;
            match letter {
                '$' => value += &self.register(inputs[index()]),
                '%' => {
                    let index = index();
                    value += &match constants[index] {
                        Constant::Number(_) => format!("f32(to.c{member}_{index})"),
                        Constant::Bits(_) => format!("to.c{member}_{index}"),
                        Constant::Place { .. } => format!("c{member}_{index}"),
                    };
                }
                other => value.push(other),
            }
        }
        value
    }

    fn register(&self, source: Source) -> String {
        match source {
            Source::Memory(input) => format!("x{input}"),
            Source::Member(member, _) if self.head() == Some(member) => "head".into(),
            Source::Member(member, output) => format!("v{member}_{output}"),
        }
    }

    /// Returns the index of the member that computes a norm's input gradient, or `None` if there is no such
    /// member. The elementwise members receive this gradient element by element.
    fn head(&self) -> Option<usize> {
        self.members.iter().position(|member| matches!(member.fusible, Fusible::NormGradInput { .. }))
    }

    /// Writes two functions for a group of neighboring elements that starts at index `i`: `fetch` loads the group,
    /// and `several` computes and stores its results. Also writes whether groups of full size may be used, which
    /// requires aligned addresses. Returns the full size: the number of elements that fill 16 bytes or, with a norm's
    /// gradient, a pack of the row.
    fn several(&self, body: &mut String, loaded: &[Element], stored: &[Element]) -> u64 {
        let bytes = loaded.iter().chain(stored).map(|element| element.dtype.size_in_bytes() as u64).min().unwrap_or(4);
        let head = self.head();
        let pack =
            head.and_then(|head| self.input(head, 0)).map_or(16 / bytes, |x| 16 / x.dtype.size_in_bytes() as u64);
        let dense = || loaded.iter().filter(|x| x.lies == Lies::Dense);
        let joined = |of: &dyn Fn(&Element) -> String, by: &str| dense().map(of).collect::<Vec<_>>().join(by);
        line(body, 1, format_args!("const auto fetch = [&](auto count, u64 i) {{"));
        line(body, 2, format_args!("[[maybe_unused]] constexpr u32 N = decltype(count)::VALUE;"));
        let kept = joined(&|x| format!("Neighbours<{}, N> x{};", x.type_name, x.index), " ");
        line(body, 2, format_args!("struct Fetched {{ {kept} }};"));
        let fetched = joined(&|x| format!("neighbours<N>(to.x{} + i)", x.index), ", ");
        line(body, 2, format_args!("return Fetched{{{fetched}}};"));
        line(body, 1, format_args!("}};"));
        let given = if head.is_some() { ", const auto& head" } else { "" };
        line(body, 1, format_args!("const auto several = [&](auto count, u64 i, const auto& fetched{given}) {{"));
        line(body, 2, format_args!("constexpr u32 N = decltype(count)::VALUE;"));
        for Element { index, .. } in dense() {
            line(body, 2, format_args!("f32 of_x{index}[N];"));
            line(body, 2, format_args!("unpack(of_x{index}, fetched.x{index});"));
        }
        for Element { index, .. } in stored {
            line(body, 2, format_args!("f32 of_y{index}[N];"));
        }
        let arguments: Vec<String> = ["i + j".to_owned()]
            .into_iter()
            .chain(head.map(|_| "head[j]".into()))
            .chain(loaded.iter().map(Element::load))
            .chain(stored.iter().map(|y| format!("of_y{}[j]", y.index)))
            .collect();
        line(body, 0, format_args!("#pragma unroll"));
        line(body, 2, format_args!("for (u32 j = 0; j < N; ++j) each({});", arguments.join(", ")));
        for Element { index, .. } in stored {
            line(body, 2, format_args!("store_neighbours(to.y{index} + i, of_y{index});"));
        }
        line(body, 1, format_args!("}};"));
        let addresses =
            dense().map(|x| format!("to.x{}", x.index)).chain(stored.iter().map(|y| format!("to.y{}", y.index)));
        let aligned: Vec<String> = addresses.map(|address| format!("is_aligned({address})")).collect();
        line(body, 1, format_args!("constexpr u32 PACK = {pack};"));
        line(body, 1, format_args!("const bool may_be_packed = {};", aligned.join(" && ")));
        pack
    }

    /// Writes the normalization of rows, or its gradient, together with the elementwise members. Returns how the rows
    /// are assigned to blocks. The inner option is `None` if no member normalizes rows; the outer one is `None` if
    /// there is no kernel for these members.
    fn rows(&self, fields: &mut Fields, body: &mut String, one_pass: Option<&OnePass>) -> Option<Option<RowBlocks>> {
        let is_of_rows = |f: &Fusible| !matches!(f, Fusible::Each { .. } | Fusible::NormGradWeight);
        let Some((member, _, fusible)) = self.members().find(|(.., f)| is_of_rows(f)) else {
            return Some(None);
        };
        let address = |index: usize| self.input(member, index).map(|operand| operand.address);
        let x = self.input(member, 0)?;
        let (width, rows, type_name) = (x.width(), launch::rows(&x), type_of(x.dtype)?);
        let with_threads = |low: u32, blocks: &RowBlocks| u64::from(low) | u64::from(blocks.row_threads) << 32;
        Some(Some(match *fusible {
            Fusible::Norm { is_centred, eps } => {
                let blocks = RowBlocks::norm(&x);
                let bias = if is_centred { address(2)? } else { 0 };
                let (y, stats) = (self.output(member, 0)?.address, self.output(member, 1)?.address);
                let eps = with_threads((eps as f32).to_bits(), &blocks);
                fields.push("NormArguments norm", [x.address, address(1)?, bias, y, stats, width, rows, eps]);
                line(body, 1, format_args!("const RowThreads own = row_threads(to.norm);"));
                line(body, 1, format_args!("const u64 width = own.row < to.norm.rows ? to.norm.width : 0;"));
                let head = "each_of_row<PACK>(own, width, may_be_packed && width % PACK == 0, [&](auto count, u64 j) {";
                line(body, 1, format_args!("{head}"));
                line(body, 2, format_args!("const u64 i = own.row * width + j;"));
                line(body, 2, format_args!("several(count, i, fetch(count, i));"));
                line(body, 1, format_args!("}});"));
                // All threads wait here, because `layer_norm` and `rms_norm` may assign the row's elements to threads
                // differently.
                line(body, 1, format_args!("__syncthreads();"));
                let name = if is_centred { "layer_norm" } else { "rms_norm" };
                line(body, 1, format_args!("{name}<{type_name}>(to.norm);"));
                blocks
            }
            Fusible::NormGradInput { is_centred } => {
                let blocks = one_pass.map_or_else(|| RowBlocks::norm_grad(&x), |one_pass| one_pass.blocks);
                let last = with_threads(u32::from(is_centred), &blocks);
                let words = [x.address, address(1)?, address(2)?, address(3)?, 0, width, rows, last];
                fields.push("NormGradInputArguments norm", words);
                let (name, fold) = match one_pass {
                    Some(OnePass { fold, rows, chunks, .. }) => {
                        fields.push("Fold fold", *fold);
                        (format!("norm_grad_to<{type_name}, PACK, {chunks}, {rows}>"), "to.fold, ")
                    }
                    None => (format!("norm_grad_input_to<{type_name}, PACK>"), ""),
                };
                line(body, 1, format_args!("{name}(to.norm, {fold}may_be_packed, fetch, several);"));
                blocks
            }
            Fusible::Each { .. } | Fusible::NormGradWeight | Fusible::EmbeddingGrad { .. } | Fusible::Product => {
                return None;
            }
        }))
    }

    /// Returns the operand in memory that a member reads: an input of the kernel, or a stored output of an earlier
    /// member. Returns `None` if that output is not stored.
    fn input(&self, member: usize, index: usize) -> Option<Operand> {
        match self.members[member].inputs[index] {
            Source::Memory(input) => Some(self.operands.inputs[input].clone()),
            Source::Member(member, output) => self.output(member, output),
        }
    }

    /// Returns how the gradients of weight and bias are computed in the same pass as the input gradient. The inner
    /// option is `None` if no member computes these gradients; the outer one is `None` if there is no kernel for
    /// them.
    fn one_pass(&self) -> Option<Option<OnePass>> {
        let found = self.members().find(|(.., fusible)| matches!(fusible, Fusible::NormGradWeight));
        let Some((member, inputs, _)) = found else { return Some(None) };
        let Source::Memory(x) = inputs[0] else { return None };
        let adds = |output: usize| {
            let index = self.outputs.iter().position(|&made| made == (member, output))?;
            Some(u64::from(self.operands.accumulates(index)) << output)
        };
        let outs = [self.output(member, 0)?, self.output(member, 1)?];
        // The only other operation may be the addition of another gradient.
        let mut each = self.members.iter().filter(|member| matches!(member.fusible, Fusible::Each { .. }));
        let is_light = each.next().is_none_or(|member| member.name == "add") && each.next().is_none();
        OnePass::of(&self.operands.inputs[x], &outs, adds(0)? | adds(1)?, is_light, self.operands).map(Some)
    }

    /// Returns the operand in which a member's output is stored, or `None` if the output is not stored.
    fn output(&self, member: usize, output: usize) -> Option<Operand> {
        let index = self.outputs.iter().position(|&made| made == (member, output))?;
        Some(self.operands.outputs[index].clone())
    }

    /// Writes the loop over all elements, in which each thread processes one group of neighbors.
    fn flat(&self, body: &mut String) {
        line(body, 1, format_args!("const u64 first = smaller(global_thread() * PACK, to.count);"));
        line(body, 1, format_args!("const u64 end = smaller(first + PACK, to.count);"));
        line(body, 1, format_args!("const auto all = Count<PACK>(); const auto one = Count<1>();"));
        let is_whole = "end - first == PACK && may_be_packed";
        line(body, 1, format_args!("if ({is_whole}) return several(all, first, fetch(all, first));"));
        line(body, 1, format_args!("for (u64 i = first; i < end; ++i) several(one, i, fetch(one, i));"));
    }
}
