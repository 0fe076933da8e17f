// Inserted at the beginning of a page, before its own scripts.
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => errors.push(`${event.violatedDirective}: ${event.blockedURI}`));

// Parses rgb(0 to 255), or color(srgb 0 to 1), which mixed colors have.
const rgb = (color) => (color.match(/[\d.]+/g) || []).map((n, index) => (color.startsWith("color(") && index < 3 ? n * 255 : +n));
// WCAG 2.2, relative luminance and contrast ratio.
const luminance = (color) => rgb(color).slice(0, 3).map((n) => n / 255).map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4))
  .reduce((sum, n, index) => sum + n * [0.2126, 0.7152, 0.0722][index], 0);
const contrast = (a, b) => (Math.max(luminance(a), luminance(b)) + 0.05) / (Math.min(luminance(a), luminance(b)) + 0.05);

function ground(node) {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (rgb(color)[3] !== 0) return color;
  }
  return "rgb(255, 255, 255)";
}

// Text with too little contrast to its background.
function faint() {
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE).map((child) => child.data.trim()).join("");
    if (!text || ["SCRIPT", "STYLE"].includes(node.tagName) || !node.checkVisibility({ opacityProperty: true })) continue;
    const style = getComputedStyle(node);
    const ratio = contrast(node instanceof SVGElement ? style.fill : style.color, ground(node));
    if (ratio < 4.5) found.push(`${node.tagName} ${text.slice(0, 40)} ${ratio.toFixed(2)}`);
  }
  return found;
}

addEventListener("load", () => setTimeout(async () => {
  let told = null;
  try {
    told = await act();
  } catch (error) {
    errors.push(String(error));
  }
  const root = document.documentElement;
  const verdict = { errors, told, faint: faint(), beyond: root.scrollWidth - root.clientWidth, ground: luminance(ground(document.body)) };
  root.setAttribute("data-verdict", JSON.stringify(verdict));
}, 1500));
