//! Opens a folder of pretrained weights, checks that the weights match the config.json, and loads them into a trainer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use gapless_engine::Trainer;
use gapless_engine::nn::{Lora, LoraInit, Trainable, VarBuilder};
use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value};

use super::config::{Config, Pretrained};
use super::error::{HfError, Result, WeightProblem};
use super::fields::read_object;
use super::layout::{ParameterLayout, StoredRange, is_known_buffer, layout, xielu_constant};
use super::low_rank::principal;
use super::quantized::dequantize;
use super::tensors::{TensorFile, is_supported};

/// The file that holds all weights of a small model.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index of a model whose weights are in several files. It gives the file of each tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Number of elements that [`Folder::check_tied`] compares at a time.
const COMPARED: usize = 1 << 16;

/// Pretrained weights: a config.json, and safetensors files with exactly the tensors that the config.json requires.
#[derive(Debug)]
pub struct Folder {
    pub(super) path: PathBuf,
    pub(super) config: Config,
    pub(super) files: Vec<TensorFile>,
    /// Metadata of the index, if there is one.
    pub(super) metadata: Option<Map<String, Value>>,
    /// For each stored tensor, the index in `files` of the file that holds it.
    pub(super) places: BTreeMap<String, usize>,
    pub(super) layout: Vec<ParameterLayout>,
}

impl Folder {
    /// Opens a folder and checks every option, every file header, and the name, type and shape of every tensor. Weights
    /// are not read.
    ///
    /// # Errors
    /// Returns the errors of [`Config::read`] and [`TensorFile::open`]. Returns [`HfError::Weights`] that lists every
    /// tensor that is missing, superfluous, or of a wrong type or shape. Returns an error if the index names a file
    /// that does not exist or is not in this folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let mut config = Config::read(path.join("config.json"))?;
        let mut problems = Vec::new();
        let (files, metadata, places) = open_files(&path, &mut problems)?;
        let shape = |(name, &at): (&'_ String, &usize)| files[at].info(name).map_or(&[][..], |info| &info.shape);
        let stored: BTreeMap<&str, &[usize]> = places.iter().map(|place| (place.0.as_str(), shape(place))).collect();
        if let Some(part) = config.text_part_mut() {
            part.find(&stored);
        }
        let layout = layout(&config, &stored);
        let folder = Self { path, files, metadata, layout, config, places };
        folder.compare(&mut problems);
        let mut pieces = folder.layout.iter().flat_map(|placed| &placed.pieces);
        if folder.config.quantization().is_some() && !pieces.any(|piece| folder.packing(piece).is_some()) {
            let why = "quantization_config says that weights are quantized, but none is; remove it".to_owned();
            return Err(HfError::Malformed { path: folder.path.join("config.json"), why });
        }
        match problems.is_empty() {
            true => Ok(folder),
            false => Err(HfError::Weights { path: folder.path, problems }),
        }
    }

    /// The folder's checked config.json.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notices for the user. Each names a part of the files that is left out of the model.
    pub fn notices(&self) -> Vec<String> {
        self.config.notices()
    }

    /// Declares the model in the builder of a [`Trainer`].
    ///
    /// # Errors
    /// Returns the errors of [`Config::model`].
    pub fn model(&self, vb: VarBuilder) -> gapless_engine::Result<Pretrained> {
        self.config.model(vb)
    }

    /// Fills the parameters of a trainer of [`Self::model`]. Parameters are read one by one, so at most one is in
    /// memory besides the arena. A pipeline rank reads only the parameters of its own stages. Adapters are left
    /// unchanged, unless their initial values follow from the weights ([`Lora::dora`], [`LoraInit::Pissa`]);
    /// [`Adapter::load`](super::Adapter::load) fills them.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, if an element is not finite, if the trainer is of another model, or
    /// if a stored head differs from the embedding to which it is tied, or if a constant of xIELU has another value. After an error, some of the trainer's
    /// parameters may have been filled.
    pub fn load(&self, trainer: &mut Trainer) -> Result<()> {
        self.check_tied()?;
        self.check_constants()?;
        let trainable = &trainer.options().step.trainable;
        let wanted = trainer.parameter_names().filter(|name| !trainable.is_adapter(name));
        let wanted: BTreeSet<String> = wanted.map(str::to_owned).collect();
        let lora = match trainable {
            Trainable::Lora(lora) => Some(lora.clone()),
            Trainable::All | Trainable::Only(_) => None,
        };
        let quantize = lora.as_ref().and_then(|lora| lora.quantize.clone());
        // The tensors in which quantized weights are stored are filled together.
        let stored = |name: &String| quantize.as_ref().map(|quantize| quantize.stored_names(name)).unwrap_or_default();
        let is_quantized = |name: &String| stored(name).get(1).is_some_and(|second| wanted.contains(second));
        let scales: BTreeSet<String> =
            wanted.iter().filter(|name| is_quantized(name)).flat_map(|name| stored(name).split_off(1)).collect();
        let placed: BTreeMap<&str, &ParameterLayout> =
            self.layout.iter().map(|one| (one.parameter.as_str(), one)).collect();
        let mut elements = Vec::new();
        for name in wanted.iter().filter(|name| !scales.contains(*name)) {
            let Some(placed) = placed.get(name.as_str()) else {
                let shape = trainer.tensor(name)?.dims().to_vec();
                return Err(self.wrong(WeightProblem::Missing { name: name.clone(), shape }));
            };
            if let Some(quantize) = quantize.as_ref().filter(|_| is_quantized(name)) {
                let read = || self.elements(placed, Vec::new());
                let quantized = self.load_quantized(trainer, quantize, placed, read)?;
                if let Some(lora) = lora.as_ref().filter(|lora| lora.dora) {
                    split_off_adapter(trainer, lora, name, &mut dequantize(quantize, &quantized))?;
                }
                continue;
            }
            elements = self.elements(placed, elements)?;
            if let Some(lora) = &lora {
                split_off_adapter(trainer, lora, name, &mut elements)?;
            }
            trainer.set_whole(name, &elements)?;
        }
        Ok(())
    }

    /// Reads the elements of a parameter into `elements`, whose old contents are dropped.
    fn elements(&self, placed: &ParameterLayout, mut elements: Vec<f32>) -> Result<Vec<f32>> {
        elements.clear();
        elements.reserve_exact(placed.pieces.iter().map(StoredRange::len).sum());
        placed.pieces.iter().try_for_each(|piece| self.read(piece, &mut elements))?;
        Ok(elements)
    }

    /// Returns the file of a stored tensor, and the tensor's entry in the header of this file. Returns `None` if no
    /// file has this tensor.
    pub(super) fn find(&self, stored: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = &self.files[*self.places.get(stored)?];
        Some((file, file.info(stored)?))
    }

    /// Reads the elements of a piece and appends them to `elements`, in the order of the parameter.
    fn read(&self, piece: &StoredRange, elements: &mut Vec<f32>) -> Result<()> {
        if let Some(packing) = self.packing(piece) {
            return self.read_packed(piece, packing, elements);
        }
        let (file, _) = self.find(&piece.stored).expect("every piece was found when the folder was opened");
        let (first, count) = (piece.elements.start, piece.elements.len());
        if piece.columns.is_none() {
            return file.read_elements(&piece.stored, first, count, |x| elements.push(x));
        }
        let mut all = Vec::with_capacity(count);
        file.read_elements(&piece.stored, first, count, |x| all.push(x))?;
        elements.extend(piece.places().map(|place| all[place]));
        Ok(())
    }

    /// Checks the names, shapes and types of the stored tensors against the configuration, and appends every mismatch
    /// to `problems`.
    fn compare(&self, problems: &mut Vec<WeightProblem>) {
        let mut used = BTreeSet::new();
        for piece in self.layout.iter().flat_map(|placed| &placed.pieces) {
            if !used.insert(piece.stored.clone()) {
                continue;
            }
            if let Some(packing) = self.packing(piece) {
                self.compare_packed(piece, packing, &mut used, problems);
                continue;
            }
            let (name, expected) = (piece.stored.clone(), piece.shape.clone());
            let Some((_, info)) = self.find(&name) else {
                // `open_files` has already reported a tensor that the index lists but that its file does not contain.
                if !self.places.contains_key(&name) {
                    problems.push(WeightProblem::Missing { name, shape: expected });
                }
                continue;
            };
            if info.shape != expected {
                problems.push(WeightProblem::Shape { name, expected, found: info.shape.clone() });
            } else if !is_supported(info.dtype) {
                problems.push(WeightProblem::Type { name, found: info.dtype.to_string() });
            }
        }
        for name in self.places.keys().filter(|name| !used.contains(*name)) {
            if let Some((_, info)) = self.find(name)
                && !is_known_buffer(&self.config, name, &info.shape)
            {
                problems.push(WeightProblem::Extra { name: name.clone(), shape: info.shape.clone() });
            }
        }
    }

    /// If the head is tied to the embedding but its weight is stored nevertheless, checks that this weight is
    /// bit-identical to the embedding.
    fn check_tied(&self) -> Result<()> {
        let name = self.config.head();
        let Some((parameter, (file, head))) = self.config.tied_to().zip(self.find(&name)) else { return Ok(()) };
        let (other, embedding_file, embedding) = self.tied(&parameter);
        let untied = || self.wrong(WeightProblem::Untied { name: name.clone(), other: other.into() });
        if head.shape != embedding.shape || head.dtype != embedding.dtype {
            return Err(untied());
        }
        let count: usize = head.shape.iter().product();
        for first in (0..count).step_by(COMPARED) {
            let (mut one, mut two) = (Vec::new(), Vec::new());
            let compared = COMPARED.min(count - first);
            file.read(head, first, compared, &mut |bytes| one.extend_from_slice(bytes))?;
            embedding_file.read(embedding, first, compared, &mut |bytes| two.extend_from_slice(bytes))?;
            if one != two {
                return Err(untied());
            }
        }
        Ok(())
    }

    /// Checks that the stored constants of xIELU have the values with which the model computes.
    fn check_constants(&self) -> Result<()> {
        for (name, &at) in &self.places {
            let file = &self.files[at];
            let Some((expected, info)) = xielu_constant(&self.config, name).zip(file.info(name)) else { continue };
            if !is_supported(info.dtype) {
                let found = info.dtype.to_string();
                return Err(self.wrong(WeightProblem::Type { name: name.clone(), found }));
            }
            let mut found = 0.0;
            file.read_elements(name, 0, 1, |x| found = f64::from(x))?;
            // The stored value is rounded to bf16, or to a subnormal number of f16.
            if (found - expected).abs() > expected.abs() / 256.0 + 1e-7 {
                let (found, supported) = (found.to_string(), expected.to_string());
                return Err(self.wrong(WeightProblem::Constant { name: name.clone(), found, supported }));
            }
        }
        Ok(())
    }

    /// Returns the embedding to which the head is tied: its stored name, its file, and its entry in the file's header.
    fn tied(&self, parameter: &str) -> (&str, &TensorFile, &TensorInfo) {
        let placed = self.layout.iter().find(|placed| placed.parameter == parameter).expect("an embedding");
        let stored = &placed.pieces[0].stored;
        let (file, info) = self.find(stored).expect("every piece was found when the folder was opened");
        (stored, file, info)
    }

    fn wrong(&self, problem: WeightProblem) -> HfError {
        HfError::Weights { path: self.path.clone(), problems: vec![problem] }
    }
}

/// If the parameter is the weight of a layer with an adapter, sets those initial values of the adapter that follow from the
/// whole weight, of which each rank keeps its part. With [`LoraInit::Pissa`], subtracts the adapter from `elements`, the elements of the weight.
fn split_off_adapter(trainer: &mut Trainer, lora: &Lora, parameter: &str, elements: &mut [f32]) -> Result<()> {
    let Some(layer) = parameter.strip_suffix(".weight").filter(|layer| lora.is_target(layer)) else { return Ok(()) };
    if !lora.dora && lora.init != LoraInit::Pissa {
        return Ok(());
    }
    let [a, b] = Lora::parameters(layer);
    let (outputs, inputs) = (trainer.window(&b)?.whole_dims()[0], trainer.window(&a)?.whole_dims()[1]);
    if lora.dora {
        let norm = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() as f32;
        let norms: Vec<f32> = elements.chunks_exact(inputs).take(outputs).map(norm).collect();
        trainer.set_whole(&Lora::magnitude(layer), &norms)?;
    }
    if lora.init == LoraInit::Pissa {
        let [mut of_b, mut of_a] = principal(elements, [outputs, inputs], lora.rank)?;
        for (row, b) in elements.chunks_exact_mut(inputs).zip(of_b.chunks_exact(lora.rank)) {
            for (a, b) in of_a.chunks_exact(inputs).zip(b) {
                row.iter_mut().zip(a).for_each(|(x, a)| *x -= a * b);
            }
        }
        // The adapter multiplies B·A by the scale.
        let root = lora.scale().sqrt().recip() as f32;
        [&mut of_a, &mut of_b].into_iter().flatten().for_each(|x| *x *= root);
        trainer.set_whole(&a, &of_a)?;
        trainer.set_whole(&b, &of_b)?;
    }
    Ok(())
}

type Opened = (Vec<TensorFile>, Option<Map<String, Value>>, BTreeMap<String, usize>);

/// Opens the only weights file, or all files that the index names. Tensors on which the index and the files disagree
/// are appended to `problems`.
fn open_files(folder: &Path, problems: &mut Vec<WeightProblem>) -> Result<Opened> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    if single.exists() {
        let file = TensorFile::open(single)?;
        let places = file.tensors().map(|(name, ..)| (name, 0)).collect();
        return Ok((vec![file], None, places));
    }
    if !index.exists() {
        return Err(HfError::NoWeights { path: folder.to_owned() });
    }
    let (map, metadata) = read_index(&index)?;
    let names: BTreeSet<&str> = map.values().map(String::as_str).collect();
    let names: Vec<&str> = names.into_iter().collect();
    for file in &names {
        let is_plain = Path::new(file).file_name() == Some(file.as_ref()) && !file.contains(['/', '\\']);
        if !is_plain {
            return Err(HfError::ShardPath { index, file: (*file).to_owned() });
        }
    }
    let files: Vec<TensorFile> = names.iter().map(|file| TensorFile::open(folder.join(file))).collect::<Result<_>>()?;
    let number = |file: &str| names.binary_search(&file).expect("one of those that the index names");
    let places: BTreeMap<String, usize> = map.iter().map(|(name, file)| (name.clone(), number(file))).collect();
    for (name, &at) in &places {
        if files[at].info(name).is_none() {
            problems.push(WeightProblem::NotInShard { name: name.clone(), file: names[at].to_owned() });
        }
    }
    for (at, file) in files.iter().enumerate() {
        for (name, ..) in file.tensors().filter(|(name, ..)| places.get(name) != Some(&at)) {
            problems.push(WeightProblem::NotInIndex { name, file: names[at].to_owned() });
        }
    }
    Ok((files, Some(metadata), places))
}

fn read_index(path: &Path) -> Result<(BTreeMap<String, String>, Map<String, Value>)> {
    let mut index = read_object(path)?;
    let malformed = |why: &str| HfError::Malformed { path: path.to_owned(), why: why.to_owned() };
    let Some(Value::Object(map)) = index.remove("weight_map") else {
        return Err(malformed("it has no weight_map"));
    };
    let text = |(name, file): (String, Value)| Some((name, file.as_str()?.to_owned()));
    let map: Option<BTreeMap<String, String>> = map.into_iter().map(text).collect();
    let map = map.ok_or_else(|| malformed("its weight_map has values that are not file names"))?;
    let metadata = index.remove("metadata").and_then(|metadata| metadata.as_object().cloned());
    Ok((map, metadata.unwrap_or_default()))
}
