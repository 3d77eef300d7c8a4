// A button on each block of code that copies it; a command that is too long for a screen breaks between words, not at hyphens.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("article .highlight-sh, article .highlight-python")) {
    const code = block.querySelector("pre");
    if (block.matches(".highlight-sh")) keepWords(code);
    if (!navigator.clipboard) continue; // only where the browser trusts the page's address
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent.trimEnd());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});

function keepWords(code) {
  const texts = [];
  for (const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT); walker.nextNode(); ) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = text.data.split(/(\S*-\S*)/).map((part) => {
      if (!part.includes("-")) return part;
      const word = document.createElement("span");
      word.className = "word";
      word.textContent = part;
      return word;
    });
    text.replaceWith(...parts);
  }
}
