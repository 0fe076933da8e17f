// Uses a report as a reader would, and returns what is visible then.
const one = (selector) => document.querySelector(selector);
const curves = (name) => [...document.querySelectorAll(`#chart-${name} path.curve`)].map((path) => path.getAttribute("d"));
const labels = (name) => [...document.querySelectorAll(`#chart-${name} svg text`)].map((text) => text.textContent);
async function act() {
  const plot = one("#chart-loss .plot");
  // Synthetic events have no pointer that could be captured.
  plot.setPointerCapture = () => {};
  const point = (type, part) => {
    const frame = one("#chart-loss .cross").ownerSVGElement.getBoundingClientRect();
    const clientX = frame.left + 58 + part * (frame.width - 72);
    plot.dispatchEvent(new PointerEvent(type, { clientX, clientY: frame.top + 80, bubbles: true, button: 0 }));
  };
  const told = { runs: [...document.querySelectorAll("#runs button")].map((button) => button.textContent) };
  told.curves = Object.fromEntries([...document.querySelectorAll("#charts section")].map(({ id }) => [id, curves(id.slice(6)).length]));
  const whole = curves("loss");

  point("pointermove", 0.5);
  told.tip = one("#tip").innerText;
  told.crosses = [...document.querySelectorAll(".cross")].filter((cross) => cross.getAttribute("d")).length;
  point("pointerdown", 0.25);
  point("pointermove", 0.5);
  told.selected = +one("#chart-loss .chosen-steps").getAttribute("width") > 80;
  point("pointerup", 0.5);
  told.zoomed = [labels("loss"), labels("lr")];
  told.is_other = curves("loss")[0] !== whole[0];
  plot.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  told.is_back = curves("loss").join() === whole.join();
  plot.dispatchEvent(new PointerEvent("pointerleave"));
  told.tip_is_hidden = one("#tip").hidden;

  one("#runs button").click();
  told.without_first = curves("loss").length;
  one("#runs button").click();
  one("#smoothing").value = 0;
  one("#smoothing").dispatchEvent(new Event("input"));
  told.unsmoothed = curves("loss").length;
  const linear = curves("loss");
  one("#log").click();
  told.is_logarithmic = curves("loss")[0] !== linear[0] && labels("loss").length >= labels("lr").length;
  told.lost = document.querySelectorAll("#chart-loss .lost").length;
  told.differing = [...document.querySelectorAll("#config > .table > table td:first-child")].map((cell) => cell.textContent);
  one("#memory .choice button:last-child").click();
  told.map = one("#memory iframe").srcdoc.length > 10000;
  told.samples = [...document.querySelectorAll("#samples .columns > div > pre")].map((sample) => sample.textContent.trim());
  return told;
}
