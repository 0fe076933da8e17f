//! Saving a folder: the stored tensors with the values of a trainer's parameters, and copies of the other files.
//!
//! In: an open folder and a trainer of its model. Out: a new folder, which is written under a temporary name next to
//! its final path and then renamed. Never: an incomplete folder under the final name, or a folder that replaces an
//! existing one.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gapless_engine::nn::{Lora, Trainable};
use gapless_engine::{TrainError, Trainer};
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::config::Config;
use super::error::{HfError, Result};
use super::fields::read_object;
use super::folder::{Folder, INDEX, SINGLE};
use super::layout::{ParameterLayout, StoredRange};
use super::quantized::{dequantized, packed_names};
use super::tensors::{Dtype, is_supported, narrow};

/// Number of elements that are converted at a time.
const CONVERTED: usize = 1 << 18;

/// Files of a model that do not depend on the weights. The files of this list that exist are copied unchanged.
const MODEL: [&str; 2] = ["config.json", "generation_config.json"];

/// Files of the processor of a multimodal model. The files of this list that exist are copied unchanged.
const PROCESSOR: [&str; 3] = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

/// Files of a tokenizer. The files of this list that exist are copied unchanged.
const TOKENIZER: [&str; 9] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// The source of one range of a stored tensor: the name of a parameter, the index of the range's first element in that
/// parameter, and the location of the range in the stored tensor.
pub(super) type Origin<'a> = (&'a str, usize, &'a StoredRange);

/// The tensors of a saved folder, by name.
type SavedTensors = BTreeMap<String, SavedTensor>;

/// A tensor of a saved folder.
#[derive(Debug)]
struct SavedTensor {
    /// Index of the file of the original folder that holds it.
    file: usize,
    /// Its first byte in this file.
    first: usize,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl SavedTensor {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl Folder {
    /// Saves a trainer's parameters as a folder at `out`, which must be empty or not exist. Tensor names and types are
    /// those of this folder; quantized weights are written dequantized. Adapters are merged into the weights of their layers;
    /// [`Self::save_adapter`] saves them separately.
    ///
    /// If `max_shard_size` is given, each file holds at most this number of bytes of tensors, and a larger tensor has a
    /// file of its own. If it is `None`, each tensor is saved in a file with the same name as in this folder.
    ///
    /// # Errors
    /// Returns [`HfError::Exists`] if `out` is not empty. Returns an error if a file cannot be read or written. After
    /// an error, no incomplete folder is left.
    pub fn save(&self, trainer: &Trainer, out: impl AsRef<Path>, max_shard_size: Option<u64>) -> Result<()> {
        self.save_with_tokenizer(trainer, out, max_shard_size, &self.path)
    }

    /// Like [`Self::save`], but copies the tokenizer's files from the folder `tokenizer`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::save`].
    pub fn save_with_tokenizer(
        &self,
        trainer: &Trainer,
        out: impl AsRef<Path>,
        max_shard_size: Option<u64>,
        tokenizer: &Path,
    ) -> Result<()> {
        write_then_rename(out.as_ref(), |partial| self.write_into(trainer, partial, max_shard_size, tokenizer))
    }

    /// Writes all files of the saved folder into an existing, empty folder. The tokenizer's files are copied from
    /// `tokenizer`.
    pub(super) fn write_into(
        &self,
        trainer: &Trainer,
        to: &Path,
        max_shard_size: Option<u64>,
        tokenizer: &Path,
    ) -> Result<()> {
        self.check_saved()?;
        let tensors = self.saved_tensors();
        copy_settings(&self.path, to)?;
        copy_files(&self.path, &PROCESSOR, to)?;
        copy_tokenizer(tokenizer, to)?;
        let origins = origins(&self.layout, &self.config);
        let shards = self.shards(&tensors, max_shard_size);
        for (file, names) in &shards {
            let path = to.join(file);
            self.write_shard(trainer, &origins, &tensors, names, &path)?;
        }
        if self.metadata.is_some() && max_shard_size.is_none() || shards.len() > 1 {
            let path = to.join(INDEX);
            let text =
                serde_json::to_vec_pretty(&self.index(&tensors, &shards)).expect("names and numbers make valid JSON");
            fs::write(&path, text).map_err(write_error(&path))?;
        }
        Ok(())
    }

    /// Returns the tensors of a saved folder: those of this folder, with each quantized weight in place of the tensors in
    /// which it is stored.
    fn saved_tensors(&self) -> BTreeMap<String, SavedTensor> {
        let saved = |(name, &file): (&String, &usize)| {
            let info = self.files[file].info(name)?;
            let (dtype, shape, first) = (info.dtype, info.shape.clone(), info.data_offsets.0);
            Some((name.clone(), SavedTensor { file, first, dtype, shape }))
        };
        let mut tensors: BTreeMap<String, SavedTensor> = self.places.iter().filter_map(saved).collect();
        for piece in self.layout.iter().flat_map(|placed| &placed.pieces) {
            let Some(packing) = self.packing(piece) else { continue };
            let parts = packed_names(piece, packing);
            if let Some(first) = parts.iter().filter_map(|name| tensors.remove(name)).reduce(|first, _| first) {
                let (dtype, shape) = (self.config.plain_dtype(), piece.shape.clone());
                tensors.insert(piece.stored.clone(), SavedTensor { dtype, shape, ..first });
            }
        }
        tensors
    }

    /// Checks that [`Self::save`] can save a folder like this one.
    ///
    /// # Errors
    /// Returns an error if other parts of a multimodal model are quantized: they are copied, but the saved config.json says
    /// that nothing is quantized.
    pub fn check_saved(&self) -> Result<()> {
        let (Some(part), Some(_)) = (self.config.text_part(), self.config.quantization()) else { return Ok(()) };
        match self.saved_tensors().iter().find(|(name, tensor)| part.is_of_other(name) && !is_supported(tensor.dtype)) {
            None => Ok(()),
            Some((name, tensor)) => {
                let why = format!("{name}, of a part that is not read, is quantized ({})", tensor.dtype);
                let remedy = "train an adapter, and merge it into the folder that is not quantized";
                Err(TrainError::config("model", why, remedy).into())
            }
        }
    }

    /// Returns the name of each file to write and the tensors in it, in the order in which this folder stores them.
    fn shards<'a>(&self, tensors: &'a SavedTensors, max_shard_size: Option<u64>) -> Vec<(String, Vec<&'a str>)> {
        let files = self.files.iter().enumerate().map(|(at, file)| {
            let name = file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut here: Vec<(&String, &SavedTensor)> =
                tensors.iter().filter(|(_, tensor)| tensor.file == at).collect();
            here.sort_by_key(|(_, tensor)| tensor.first);
            (name, here.into_iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())
        });
        let Some(most) = max_shard_size else { return files.collect() };
        let (mut shards, mut bytes): (Vec<Vec<&str>>, u64) = (Vec::new(), 0);
        for name in files.flat_map(|(_, names)| names) {
            let size = tensors[name].bytes() as u64;
            match shards.last_mut().filter(|_| bytes + size <= most) {
                Some(shard) => shard.push(name),
                None => {
                    shards.push(vec![name]);
                    bytes = 0;
                }
            }
            bytes += size;
        }
        let count = shards.len();
        let file = |at: usize| match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
        };
        shards.into_iter().enumerate().map(|(at, names)| (file(at), names)).collect()
    }

    fn index(&self, tensors: &SavedTensors, shards: &[(String, Vec<&str>)]) -> Value {
        let bytes: usize = tensors.values().map(SavedTensor::bytes).sum();
        let mut metadata = self.metadata.clone().unwrap_or_else(|| {
            let elements: usize = tensors.values().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
            Map::from_iter([("total_parameters".to_owned(), json!(elements))])
        });
        metadata.insert("total_size".into(), json!(bytes));
        let places = shards.iter().flat_map(|(file, names)| names.iter().map(move |name| (*name, file.as_str())));
        json!({ "metadata": metadata, "weight_map": places.collect::<BTreeMap<&str, &str>>() })
    }

    fn write_shard(
        &self,
        trainer: &Trainer,
        origins: &BTreeMap<String, Vec<Origin<'_>>>,
        tensors: &SavedTensors,
        names: &[&str],
        path: &Path,
    ) -> Result<()> {
        let tensors = names.iter().map(|name| {
            let SavedTensor { dtype, ref shape, .. } = tensors[*name];
            (*name, dtype, &shape[..])
        });
        write_file(path, tensors.collect(), self.files[0].metadata(), &mut |name, dtype, write| match origins.get(name)
        {
            Some(parts) => write_parts(trainer, dtype, parts, write, path),
            None => self.copy(name, write, path),
        })
    }

    /// Copies a stored tensor that belongs to no parameter.
    fn copy(&self, name: &str, write: &mut dyn FnMut(&[u8]) -> io::Result<()>, path: &Path) -> Result<()> {
        let (file, info) = self.find(name).expect("one of the folder's tensors");
        let mut written = Ok(());
        file.read(info, 0, info.shape.iter().product(), &mut |bytes| {
            if written.is_ok() {
                written = write(bytes);
            }
        })?;
        written.map_err(write_error(path))
    }
}

/// Copies the files of a model folder that hold its settings: config.json, and generation_config.json if it exists. The copy
/// of config.json has no `quantization_config`, because quantized weights are written dequantized.
///
/// # Errors
/// Returns an error if there is no config.json, or if a file cannot be copied.
pub fn copy_settings(model: &Path, to: &Path) -> Result<()> {
    copy_files(model, &MODEL, to)?;
    let config = read_object(&to.join("config.json"))?;
    if config.contains_key("quantization_config") { replace_config(config, to) } else { Ok(()) }
}

/// Replaces a copied config.json by these options, without `quantization_config`.
pub(super) fn replace_config(mut config: Map<String, Value>, to: &Path) -> Result<()> {
    config.remove("quantization_config");
    let text = serde_json::to_vec_pretty(&config).expect("names and numbers make valid JSON");
    let path = to.join("config.json");
    // The copy has the permissions of the original, which may be read-only.
    fs::remove_file(&path).and_then(|()| fs::write(&path, text)).map_err(write_error(&path))
}

/// Copies the files of a tokenizer that exist, such as tokenizer.json and a chat template.
///
/// # Errors
/// Returns an error if a file cannot be copied.
pub fn copy_tokenizer(folder: &Path, to: &Path) -> Result<()> {
    copy_files(folder, &TOKENIZER, to)
}

fn copy_files(from: &Path, names: &[&str], to: &Path) -> Result<()> {
    for name in names {
        let from = from.join(name);
        if from.is_file() || *name == "config.json" {
            fs::copy(&from, to.join(name)).map_err(write_error(&to.join(name)))?;
        }
    }
    Ok(())
}

/// Returns the origins of each stored tensor's parts, in the order of the tensor's elements. Tensors that belong to no
/// parameter are left out.
pub(super) fn origins<'a>(layout: &'a [ParameterLayout], config: &Config) -> BTreeMap<String, Vec<Origin<'a>>> {
    let mut origins: BTreeMap<String, Vec<Origin<'_>>> = BTreeMap::new();
    for placed in layout {
        let mut first = 0;
        for piece in &placed.pieces {
            origins.entry(piece.stored.clone()).or_default().push((&placed.parameter, first, piece));
            first += piece.len();
        }
    }
    // If a tied head is stored nevertheless, it has the elements of the embedding.
    let tied = config.tied_to();
    if let Some(placed) = layout.iter().find(|placed| Some(&placed.parameter) == tied.as_ref()) {
        origins.insert(config.head(), vec![(&placed.parameter, 0, &placed.pieces[0])]);
    }
    origins.values_mut().for_each(|parts| parts.sort_by_key(|(.., piece)| piece.elements.start));
    origins
}

/// Writes the bytes of one tensor of a file. Gets the tensor's name and type, and the function that writes to the file.
type WriteTensor<'a> = dyn FnMut(&str, Dtype, &mut dyn FnMut(&[u8]) -> io::Result<()>) -> Result<()> + 'a;

/// Writes a safetensors file. `tensors` has the name, the type and the shape of each tensor.
pub(super) fn write_file(
    path: &Path,
    mut tensors: Vec<(&str, Dtype, &[usize])>,
    metadata: Option<HashMap<String, String>>,
    write: &mut WriteTensor<'_>,
) -> Result<()> {
    let failed = write_error(path);
    // Tensors of the widest type come first, so every tensor is aligned. Tensors of the same type keep their order.
    tensors.sort_by_key(|(_, dtype, _)| std::cmp::Reverse(dtype.bitsize()));
    let mut end = 0;
    let infos = tensors.iter().map(|&(name, dtype, shape)| {
        let first = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name.to_owned(), TensorInfo { dtype, shape: shape.to_vec(), data_offsets: (first, end) })
    });
    let malformed = |why: String| HfError::Malformed { path: path.to_owned(), why };
    // Older versions of transformers refuse files without the metadata entry `format`.
    let metadata = metadata.unwrap_or_else(|| [("format".to_owned(), "pt".to_owned())].into());
    let header = Metadata::new(Some(metadata), infos.collect()).map_err(|e| malformed(e.to_string()))?;
    let mut header = serde_json::to_vec(&header).expect("names and numbers make valid JSON");
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut file = BufWriter::new(File::create(path).map_err(&failed)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(&failed)?;
    file.write_all(&header).map_err(&failed)?;
    for (name, dtype, _) in tensors {
        write(name, dtype, &mut |bytes| file.write_all(bytes))?;
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)
}

/// Writes the elements of a stored tensor, which consists of parts of parameters.
pub(super) fn write_parts(
    trainer: &Trainer,
    dtype: Dtype,
    parts: &[Origin<'_>],
    write: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    path: &Path,
) -> Result<()> {
    let mut bytes = Vec::new();
    let mut write = |elements: &[f32]| {
        bytes.clear();
        narrow(elements, dtype, &mut bytes);
        write(&bytes).map_err(write_error(path))
    };
    // Pieces of the same range are columns of one matrix.
    for parts in parts.chunk_by(|(.., a), (.., b)| a.elements == b.elements) {
        let length = parts[0].2.elements.len();
        let mut matrix = parts[0].2.columns.map(|_| vec![0.0; length]);
        for &(parameter, first, piece) in parts {
            let values = merged(trainer, parameter)?.flatten_all()?;
            let part = |first, count| values.narrow(0, first, count)?.to_dtype(DType::F32)?.to_vec1::<f32>();
            match &mut matrix {
                // A matrix is converted as a whole; any other piece is converted `CONVERTED` elements at a time.
                Some(matrix) => {
                    let elements = part(first, piece.len())?;
                    piece.places().zip(elements).for_each(|(place, element)| matrix[place] = element);
                }
                None => {
                    for begin in (0..length).step_by(CONVERTED) {
                        write(&part(first + begin, CONVERTED.min(length - begin))?)?;
                    }
                }
            }
        }
        if let Some(matrix) = matrix {
            write(&matrix)?;
        }
    }
    Ok(())
}

/// Writes a folder under a temporary name next to `out`, then renames it to `out`. If writing or renaming fails, the
/// temporary folder is removed.
pub(super) fn write_then_rename<E: From<HfError>>(
    out: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    // A slash at the end would put the temporary folder into `out`.
    let out = &out.components().collect::<PathBuf>();
    if out.exists() && fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) || out.is_file() {
        return Err(HfError::Exists { path: out.clone() }.into());
    }
    let partial = free_name_beside(out);
    let put = || {
        fs::create_dir_all(&partial).map_err(write_error(&partial))?;
        write(&partial)?;
        sync_folder(&partial).map_err(write_error(&partial))?;
        fs::rename(&partial, out).map_err(write_error(out))?;
        let parent = out.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        Ok(sync_folder(parent).map_err(write_error(parent))?)
    };
    let saved = put();
    if saved.is_err() {
        // If the removal fails too, the first error is reported.
        let _ = fs::remove_dir_all(&partial);
    }
    saved
}

/// Returns an unused path next to `out` for the incomplete folder.
fn free_name_beside(out: &Path) -> PathBuf {
    let beside = |number: u64| {
        let mut path = out.as_os_str().to_owned();
        path.push(if number == 0 { ".partial".to_owned() } else { format!(".partial.{number}") });
        PathBuf::from(path)
    };
    (0..).map(beside).find(|path| fs::symlink_metadata(path).is_err()).expect("numbers do not end")
}

/// Returns a parameter's value. If the parameter is the weight W of a layer with an adapter, returns W with the adapter
/// merged: W + scale · B·A, whose rows DoRA scales to their magnitudes.
fn merged(trainer: &Trainer, parameter: &str) -> Result<Tensor> {
    let value = trainer.tensor(parameter)?;
    let Trainable::Lora(lora) = &trainer.options().step.trainable else { return Ok(value) };
    let value = match &lora.quantize {
        Some(quantize) if value.dtype() == DType::U8 => {
            let elements = dequantized(trainer, quantize, parameter)?;
            let count = elements.len();
            Tensor::from_vec(elements, count, &Device::Cpu)?
        }
        _ => value,
    };
    let Some(layer) = parameter.strip_suffix(".weight").filter(|layer| lora.is_target(layer)) else { return Ok(value) };
    let factor = |name: &str| Ok::<_, HfError>(trainer.tensor(name)?.to_dtype(DType::F32)?.copy()?);
    let [a, b] = Lora::parameters(layer);
    let added = (factor(&b)?.matmul(&factor(&a)?)? * lora.scale())?;
    let value = value.flatten_all()?.narrow(0, 0, added.elem_count())?.reshape(added.shape())?;
    let merged = (value.to_dtype(DType::F32)? + added)?;
    if !lora.dora {
        return Ok(merged);
    }
    let norms = merged.sqr()?.sum_keepdim(1)?.sqrt()?;
    let magnitudes = factor(&Lora::magnitude(layer))?.reshape(norms.shape())?;
    Ok(merged.broadcast_mul(&(magnitudes / norms)?)?)
}

pub(super) fn write_error(path: &Path) -> impl Fn(io::Error) -> HfError {
    move |source| HfError::Write { path: path.to_owned(), source }
}

/// Makes the names of a folder's entries durable, as `fsync` does for a folder. Does nothing on Windows, which has no
/// such operation and does not need it.
fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}
