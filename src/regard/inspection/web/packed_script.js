/** Entry point of a file with a model, which also holds the script of the page in packed form: run that script. */

import { inflate, unpackText } from "./packed_text.js";

const packed = document.getElementById("script")?.textContent ?? "";
inflate(unpackText(packed)).text().then((code) => {
  const script = document.createElement("script");
  script.src = URL.createObjectURL(new Blob([code], { type: "text/javascript;charset=utf-8" })); // not that of the page
  document.body.append(script);
});
